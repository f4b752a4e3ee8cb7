"""How long a row's output will be, learnt from those that have ended.

The logarithm of an output's length is taken to be normal: a mean of the row's group (the task,
where rows have one), a slope on the logarithm of the prompt's size, and a spread. Groups lean on
the mean of all groups until they have rows of their own. A row that has not ended, or was cut at
its limit, says only that it is longer than that, and counts as what it then probably will be:
without those the short rows, which end first, would pass for all.

`LengthSums` is what a worker has seen, small and additive; the coordinator adds them up and makes
a `LengthModel` of them, which is small and immutable too, and goes back to the workers with the
answers to their reports.

Shape letters: N rows, G groups.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

MAX_GROUPS = 256
"""Groups told apart; rows of further ones count as of none."""
NO_GROUP = -1
MEAN_PRIOR = 256.0
"""Output tokens of a row before anything has ended."""
SPREAD_PRIOR = 1.0
"""Standard deviation of log length before anything has ended."""
PRIOR_ROWS = 4.0
"""What the priors are worth, in rows."""
REFRESH_SECONDS = 5.0
"""How often a worker works out what its live rows say."""


class RowFacts(NamedTuple):
    """What is known of a row before it starts."""

    group: int
    """The task: a hash of its template, system prompt or the like; `NO_GROUP` if it has none."""
    prompt_size: float
    """Characters of its prompt; tokens would do too, but the same measure for all rows of a job."""
    max_new_tokens: int


class FactColumns(NamedTuple):
    """The facts of many rows."""

    groups_N: NDArray[np.int64]
    sizes_N: NDArray[np.float64]
    limits_N: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[RowFacts]) -> Self:
        """Of these rows, in order."""
        groups, sizes, limits = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            np.array(groups, np.int64), np.array(sizes, np.float64), np.array(limits, np.int64)
        )

    def at(self, index_M: NDArray[np.integer]) -> "FactColumns":
        """Those of some of the rows."""
        return FactColumns(self.groups_N[index_M], self.sizes_N[index_M], self.limits_N[index_M])


class GroupSums(NamedTuple):
    """Sums over rows of one group: x = log prompt size, y = log output tokens."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def plus(self, other: "GroupSums") -> "GroupSums":
        """The sum, field by field."""
        return GroupSums._make(a + b for a, b in zip(self, other, strict=True))


LengthSums = Mapping[int, GroupSums]
"""By group. Sums of disjoint sets of rows add up: see `added`."""


def added(many: Iterable[LengthSums]) -> dict[int, GroupSums]:
    """The sums of all; of more than `MAX_GROUPS` groups the smallest count as of none."""
    lists: dict[int, list[float]] = {}
    for sums in many:
        for group, values in sums.items():
            total = lists.get(group)
            if total is None:
                lists[group] = list(values)
            else:
                for i, value in enumerate(values):
                    total[i] += value
    totals = _frozen(lists)
    if len(totals) > MAX_GROUPS:
        by_size = sorted(totals, key=lambda group: (-totals[group].count, group))
        for group in [g for g in by_size if g != NO_GROUP][MAX_GROUPS - 1 :]:
            totals[NO_GROUP] = totals.get(NO_GROUP, GroupSums()).plus(totals.pop(group))
    return totals


class LengthModel(NamedTuple):
    """Predicts lengths. Immutable and small: a number per group, and a few more."""

    mean: float = math.log(MEAN_PRIOR)
    """Of the log length in a group not known, at prompts of size `exp(center)`."""
    slope: float = 0.0
    center: float = 0.0
    spread: float = SPREAD_PRIOR
    """Standard deviation of log length within a group."""
    unknown_spread: float = SPREAD_PRIOR
    """The same for a row of a group not known."""
    groups: tuple[int, ...] = ()
    """Known groups, in order."""
    means: tuple[float, ...] = ()
    """`mean` for each of them."""
    num_rows: float = 0.0
    """Rows it was learnt from."""
    any_mean: float = math.log(MEAN_PRIOR)
    """Mean log length of all rows: of a row of which nothing is known."""
    any_spread: float = SPREAD_PRIOR

    @classmethod
    def of(cls, sums: LengthSums) -> "LengthModel":
        """The model that these sums give."""
        if not sums:
            return cls()
        groups = tuple(sorted(sums))
        table_GF = np.array([sums[group] for group in groups])
        n_G, x_G, y_G, xx_G, xy_G, yy_G = table_GF.T
        num_rows = float(n_G.sum())
        center = float(x_G.sum() / num_rows)
        safe_G = np.maximum(n_G, 1e-9)
        within_xx = float((xx_G - x_G**2 / safe_G).sum())
        within_xy = float((xy_G - x_G * y_G / safe_G).sum())
        within_yy = float((yy_G - y_G**2 / safe_G).sum())
        slope = within_xy / (max(within_xx, 0.0) + PRIOR_ROWS)
        rest = within_yy - 2 * slope * within_xy + slope**2 * within_xx
        freedom = max(num_rows - len(groups), 0.0)
        variance = (max(rest, 0.0) + PRIOR_ROWS * SPREAD_PRIOR**2) / (freedom + PRIOR_ROWS)
        means_G = (y_G - slope * (x_G - n_G * center)) / safe_G
        between = _between_groups(means_G, n_G, variance)
        trust_G = n_G * between / (n_G * between + variance)
        middle = _middle(means_G, n_G, between, variance)
        return cls(
            mean=middle,
            slope=slope,
            center=center,
            spread=math.sqrt(variance),
            unknown_spread=math.sqrt(variance + between),
            groups=groups,
            means=tuple((middle + trust_G * (means_G - middle)).tolist()),
            num_rows=num_rows,
            any_mean=float(y_G.sum()) / num_rows,
            any_spread=math.sqrt(_variance(num_rows, float(y_G.sum()), float(yy_G.sum()))),
        )

    def log_means(self, rows: FactColumns) -> NDArray[np.float64]:
        """The mean log length of rows, limits aside, `[N]`."""
        means_N = np.full(len(rows.groups_N), self.mean)
        if self.groups:
            known_G = np.array(self.groups)
            at_N = np.minimum(np.searchsorted(known_G, rows.groups_N), len(known_G) - 1)
            is_known_N = known_G[at_N] == rows.groups_N
            means_N[is_known_N] = np.array(self.means)[at_N[is_known_N]]
        return means_N + self.slope * (np.log(np.maximum(rows.sizes_N, 1.0)) - self.center)

    def log_mean(self, row: RowFacts) -> float:
        """The mean log length of one row, its limit aside."""
        at = bisect_left(self.groups, row.group)
        is_known = at < len(self.groups) and self.groups[at] == row.group
        mean = self.means[at] if is_known else self.mean
        return mean + self.slope * (math.log(max(row.prompt_size, 1.0)) - self.center)


def residual(log_mean: float, spread: float, num_tokens: float, limit: float) -> float:
    """Mean tokens still to come of a row with so many, of log-normal length cut at a limit."""
    if num_tokens >= limit:
        return 0.0
    upper = (math.log(limit) - log_mean) / spread
    lower = (math.log(num_tokens) - log_mean) / spread if num_tokens > 0 else -math.inf
    alive = _beyond(lower)
    if alive < 1e-12:  # far beyond what was predicted: the tail is nearly a power of the length
        rate = max((math.log(max(num_tokens, 1.0)) - log_mean) / spread**2 - 1.0, 1.0)
        return min(num_tokens / rate, limit - num_tokens)
    scale = math.exp(log_mean + spread**2 / 2)
    before = scale * (_beyond(lower - spread) - _beyond(upper - spread))
    return max((before + limit * _beyond(upper)) / alive - num_tokens, 1.0)


class LengthTally:
    """A worker's sums: cumulative since its attempt began, so that a lost report loses nothing."""

    def __init__(self) -> None:
        self._ended: dict[int, list[float]] = {}
        self._sums: LengthSums = {}
        self._at = -math.inf

    def add(self, row: RowFacts, num_tokens: int, model: LengthModel, *, cut: bool = False) -> None:
        """A row has ended with so many output tokens.

        Args:
            row: its facts.
            num_tokens: of its output.
            model: the newest that this worker has.
            cut: whether it ended at its limit, and would have been longer.
        """
        y = math.log(max(num_tokens, 1))
        yy = y * y
        if cut:
            y, yy = _moments_beyond(model.log_mean(row), model.spread, y)
        _count(self._ended, row, y, yy)

    def sums(
        self, live: Iterable[tuple[RowFacts, int]], model: LengthModel, now: float
    ) -> LengthSums:
        """What the ended rows and the live ones say; worked out every few seconds.

        Args:
            live: rows that are being decoded, and how many output tokens each has.
            model: the newest that this worker has.
            now: seconds of any clock.
        """
        if now - self._at >= REFRESH_SECONDS:
            self._at = now
            live_sums = {}
            for row, num_tokens in live:
                log_tokens = math.log(max(num_tokens, 1))
                y, yy = _moments_beyond(model.log_mean(row), model.spread, log_tokens)
                _count(live_sums, row, y, yy)
            self._sums = added([_frozen(self._ended), _frozen(live_sums)])
        return self._sums


def _count(sums: dict[int, list[float]], row: RowFacts, y: float, yy: float) -> None:
    """Add a row of log length `y` to its group's sums."""
    x = math.log(max(row.prompt_size, 1.0))
    total = sums.get(row.group)
    if total is None:
        group = row.group if len(sums) < MAX_GROUPS else NO_GROUP
        total = sums.setdefault(group, [0.0] * len(GroupSums._fields))
    total[0] += 1.0
    total[1] += x
    total[2] += y
    total[3] += x * x
    total[4] += x * y
    total[5] += yy


def _frozen(sums: Mapping[int, Sequence[float]]) -> dict[int, GroupSums]:
    return {group: GroupSums._make(values) for group, values in sums.items()}


def _variance(count: float, total: float, squares: float) -> float:
    """The variance of values with these sums, leaning on the prior while they are few."""
    around = max(squares - total**2 / count, 0.0)
    return (around + PRIOR_ROWS * SPREAD_PRIOR**2) / (count + PRIOR_ROWS)


def _between_groups(
    means_G: NDArray[np.float64], n_G: NDArray[np.float64], variance: float
) -> float:
    """The variance of the groups' true means, by the method of moments."""
    total = float(n_G.sum())
    spread_out = total - float((n_G**2).sum()) / total
    if len(n_G) < 2 or spread_out <= 0:
        return SPREAD_PRIOR**2
    middle = float((n_G * means_G).sum()) / total
    excess = float((n_G * (means_G - middle) ** 2).sum()) - (len(n_G) - 1) * variance
    return max(excess / spread_out, 1e-4)


def _middle(
    means_G: NDArray[np.float64], n_G: NDArray[np.float64], between: float, variance: float
) -> float:
    """The mean of the groups' means, each weighed by how well it is known."""
    weights_G = 1 / (between + variance / np.maximum(n_G, 1e-9))
    prior_weight = PRIOR_ROWS / (PRIOR_ROWS * between + variance)
    total = float((weights_G * means_G).sum()) + prior_weight * math.log(MEAN_PRIOR)
    return total / (float(weights_G.sum()) + prior_weight)


def _beyond(z: float) -> float:
    """The probability that a standard normal variable is greater than z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def _moments_beyond(mean: float, spread: float, y: float) -> tuple[float, float]:
    """Mean and mean square of a normal variable known to be greater than y."""
    z = (y - mean) / spread
    tail = _beyond(z)
    ratio = math.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * tail) if tail > 1e-12 else z + 1 / z
    first = mean + spread * ratio
    return first, spread**2 * (1 + z * ratio - ratio**2) + first**2
