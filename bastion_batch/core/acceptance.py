"""How probable it is that a drafted token is accepted, learnt from what was.

The drafter's `q` is a marginal, and off its own most probable path it overstates most. Every
verified node whose parent was accepted is one yes or no for its `q`; per sampling group, depth and
whether the parent lies on the top-1 path, an increasing map from `q` to acceptance is kept. All
children of a parent share one map and are scaled to sum to at most 1, so siblings keep their order
and a child never outscores its parent: all that best-first needs.

Shape letters: G sampling groups, D depths, B knots in q, R rows, K ranks, P = 2 (parent off, on
the top-1 path).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.tree import PathScores
from bastion_batch.records import SamplingParams

KNOTS = np.array([1e-4, 1e-3, 4e-3, 0.015, 0.04, 0.1, 0.2, 0.32, 0.45, 0.6, 0.75, 0.87, 0.95, 0.99])
"""Values of q at which acceptance is estimated; between them it is interpolated in log q."""

NUM_GROUPS = 8
OFF_PATH_PRIOR = 0.55
"""Prior acceptance per unit of q where the parent is off the top-1 path; on it the prior is q.
Measured with one drafter: at q about 0.62 and depth 2, 0.34 of such tokens were accepted."""
PRIOR_WEIGHT = 12.0
"""Observations that the prior is worth."""
MAX_ACCEPTANCE = 0.999
REFRESH_STEPS = 8
FORGET_PER_REFRESH = 0.998


class Outcome(NamedTuple):
    """A verified node whose parent was accepted."""

    group: int
    depth: int
    on_path: bool
    """Whether its parent lies on the drafter's top-1 path."""
    log_q: float
    accepted: bool


def sampling_group(sampling: SamplingParams) -> int:
    """Rows whose tokens are accepted alike: temperature 0, to 0.5, to 1, above; filtered or not."""
    by_temperature = int(np.searchsorted([0.0, 0.5, 1.0], sampling.temperature))
    filtered = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
    return 2 * by_temperature + int(filtered)


class AcceptanceModel:
    """Maps from q to acceptance, updated by outcomes.

    Args:
        max_depth: D.
    """

    def __init__(self, max_depth: int) -> None:
        shape = (NUM_GROUPS, max_depth, 2, len(KNOTS))
        self._trials = np.zeros(shape)
        self._successes = np.zeros(shape)
        self._prior = np.stack([OFF_PATH_PRIOR * KNOTS, KNOTS])
        self._log_knots = np.log(KNOTS)
        self._steps = 0
        self._seen: set[int] = set()
        self._maps = np.stack([self._fitted(group) for group in range(NUM_GROUPS)])

    @property
    def num_outcomes(self) -> float:
        """Outcomes remembered, old ones at a discount."""
        return float(self._trials.sum())

    def log_scores(
        self, log_probs_RDK: NDArray[np.floating], groups_R: NDArray[np.integer]
    ) -> PathScores:
        """Log acceptance of every candidate, its parent being off or on the top-1 path.

        Args:
            log_probs_RDK: the drafter's log-probabilities, decreasing along K.
            groups_R: each row's sampling group.
        """
        below, weight = self._place(log_probs_RDK)
        depths = np.arange(log_probs_RDK.shape[1])[None, :, None]
        groups = groups_R[:, None, None]
        return PathScores(
            off_RDK=self._scaled(log_probs_RDK, self._maps[groups, depths, 0], below, weight),
            on_RDK=self._scaled(log_probs_RDK, self._maps[groups, depths, 1], below, weight),
        )

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Take in the outcomes of one step."""
        for group, depth, on_path, log_q, accepted in outcomes:
            knot = int(np.searchsorted(self._log_knots, log_q))
            knot -= knot == len(KNOTS) or (
                knot > 0 and log_q - self._log_knots[knot - 1] < self._log_knots[knot] - log_q
            )
            place = (group, depth - 1, int(on_path), knot)
            self._seen.add(group)
            self._trials[place] += 1
            self._successes[place] += accepted
        self._steps += 1
        if self._steps % REFRESH_STEPS == 0:
            self._trials *= FORGET_PER_REFRESH
            self._successes *= FORGET_PER_REFRESH
            for group in self._seen:
                self._maps[group] = self._fitted(group)

    def _place(
        self, log_probs: NDArray[np.floating]
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Knot below each value, and how far the value is on the way to the next one."""
        inside = np.clip(log_probs, self._log_knots[0], self._log_knots[-1])
        below = np.clip(np.searchsorted(self._log_knots, inside) - 1, 0, len(KNOTS) - 2)
        start, end = self._log_knots[below], self._log_knots[below + 1]
        return below, (inside - start) / (end - start)

    def _scaled(
        self,
        log_probs_RDK: NDArray[np.floating],
        maps: NDArray[np.float64],
        below: NDArray[np.intp],
        weight: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        maps = np.broadcast_to(maps, (*log_probs_RDK.shape[:2], 1, len(KNOTS)))[:, :, 0]
        low = np.take_along_axis(maps, below, -1)
        high = np.take_along_axis(maps, below + 1, -1)
        acceptance = low + weight * (high - low)
        under = log_probs_RDK < self._log_knots[0]  # too rare to have been seen: in proportion
        acceptance = np.where(under, low * np.exp(log_probs_RDK) / KNOTS[0], acceptance)
        acceptance /= np.maximum(acceptance.sum(-1, keepdims=True), 1.0)
        with np.errstate(divide="ignore"):
            return np.log(np.minimum(acceptance, MAX_ACCEPTANCE))

    def _fitted(self, group: int) -> NDArray[np.float64]:
        """The nearest increasing map to the shrunk frequencies (isotonic regression), `[D, P, B]`.

        Pool-adjacent-violators by its max-min formula, all maps at once.
        """
        weights = self._trials[group] + PRIOR_WEIGHT
        sums = self._successes[group] + PRIOR_WEIGHT * self._prior
        zero = np.zeros((*weights.shape[:-1], 1))
        total_weight = np.concatenate([zero, weights.cumsum(-1)], -1)
        total_sum = np.concatenate([zero, sums.cumsum(-1)], -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (total_sum[..., None, 1:] - total_sum[..., :-1, None]) / (
                total_weight[..., None, 1:] - total_weight[..., :-1, None]
            )  # of knots i to j
        size = len(KNOTS)
        forward = np.tri(size, dtype=np.bool_).T  # j >= i
        mean = np.where(forward, mean, np.inf)
        least_from = np.minimum.accumulate(mean[..., ::-1], -1)[..., ::-1]
        return np.where(forward, least_from, -np.inf).max(-2)
