"""How much faster one arm is than another, from blocks that were taken next to each other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
INTERVAL = (0.05, 0.95)


class Share(NamedTuple):
    """What one arm did in one group: output tokens, and the seconds they took."""

    num_tokens: int
    seconds: float


class Ratio(NamedTuple):
    """The speed of one arm over another's, with 90 % bootstrap intervals over the groups.

    The median is of the groups' own ratios. The pooled ratio is of all tokens over all seconds:
    it is the steadier of the two where a group's text decides most of its speed.
    """

    median: float
    low: float
    high: float
    pooled: float
    pooled_low: float
    pooled_high: float
    num_groups: int


def paired_ratio(shares: Sequence[Share], baseline: Sequence[Share]) -> Ratio:
    """The speed of `shares` over `baseline`, group by group.

    Raises:
        ValueError: the two have no groups, or not the same number of them.
    """
    if not shares or len(shares) != len(baseline):
        raise ValueError(f"{len(shares)} groups against {len(baseline)}: pairs are needed")
    tokens_G, seconds_G = _columns(shares)
    base_tokens_G, base_seconds_G = _columns(baseline)
    ratios_G = (tokens_G / seconds_G) / (base_tokens_G / base_seconds_G)
    num_groups = len(shares)
    draws = np.random.default_rng(0).integers(0, num_groups, (NUM_RESAMPLES, num_groups))
    low, high = np.quantile(np.median(ratios_G[draws], 1), INTERVAL)

    def pooled(rows: NDArray[np.integer]) -> NDArray[np.float64]:
        speed = tokens_G[rows].sum(-1) / seconds_G[rows].sum(-1)
        return speed / (base_tokens_G[rows].sum(-1) / base_seconds_G[rows].sum(-1))

    pooled_low, pooled_high = np.quantile(pooled(draws), INTERVAL)
    return Ratio(
        float(np.median(ratios_G)),
        float(low),
        float(high),
        float(pooled(np.arange(num_groups))),
        float(pooled_low),
        float(pooled_high),
        num_groups,
    )


class Estimate(NamedTuple):
    """A median with its 90 % bootstrap interval."""

    median: float
    low: float
    high: float


def estimate(values_G: NDArray[np.float64]) -> Estimate:
    """The median of what groups gave."""
    draws = np.random.default_rng(0).integers(0, len(values_G), (NUM_RESAMPLES, len(values_G)))
    low, high = np.quantile(np.median(values_G[draws], 1), INTERVAL)
    return Estimate(float(np.median(values_G)), float(low), float(high))


def _columns(shares: Sequence[Share]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    tokens, seconds = zip(*shares, strict=True)
    return np.array(tokens, np.float64), np.array(seconds, np.float64)
