"""How probable it is that a drafted token is accepted, learnt from what was.

The drafter's `q` is a marginal, and off its own most probable path it overstates most. Every
verified node is one yes or no for its `q`; per sampling group, depth and whether the parent lies on
the top-1 path, an increasing map from `q` to acceptance is kept. All children of a parent share one
map and are scaled to sum to at most 1, so siblings keep their order and a child never outscores its
parent: all that best-first needs.

A node counts as much as its parent was thought likely to be accepted, so that what the maps of a
path multiply to is what comes true of whole paths. Counted only where the parent was accepted, each
map would be right and the product 5 % too small at depth 2 and more: where the drafter is sure of a
later position it is right more often about the ones before, too.

Where little was seen a map leans on what was seen near by: the prior is scaled by how far it
overstates at the same depth and path, and that in turn by how far it does in the whole group. One
overstated guess per value of `q` would outlast thousands of steps, as most values are rare.

Shape letters: G sampling groups, D depths, B knots in q, R rows, K ranks, N outcomes, P = 2 (parent
off, on the top-1 path).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.tree import DraftTree, PathScores
from bastion_batch.records import SamplingParams

VERSION = 2
"""Raised when what was learnt by an older version would be misread."""

KNOTS = np.array([1e-4, 1e-3, 4e-3, 0.015, 0.04, 0.1, 0.2, 0.32, 0.45, 0.6, 0.75, 0.87, 0.95, 0.99])
"""Values of q at which acceptance is estimated; between them it is interpolated in log q."""

NUM_GROUPS = 8
OFF_PATH_PRIOR = 0.55
"""Prior acceptance per unit of q where the parent is off the top-1 path; on it the prior is q.
Measured with one drafter: at q about 0.62 and depth 2, 0.34 of such tokens were accepted."""
PRIOR_WEIGHT = 12.0
"""Observations that the prior is worth."""
SHARE_WEIGHT = 5.0
"""Expected acceptances that a share of the prior is shrunk by."""
MAX_ACCEPTANCE = 0.999
REFRESH_STEPS = 8
FORGET_PER_REFRESH = 0.998


class Outcomes(NamedTuple):
    """Verified nodes, and what came of them."""

    groups_N: NDArray[np.intp]
    depths_N: NDArray[np.intp]
    """From 1."""
    on_path_N: NDArray[np.intp]
    """1 where the parent lies on the drafter's top-1 path, else 0."""
    log_qs_N: NDArray[np.float64]
    parent_scores_N: NDArray[np.float64]
    """How probable it was thought that the parent is accepted."""
    accepted_N: NDArray[np.bool_]

    @property
    def num_outcomes(self) -> int:
        """N."""
        return len(self.log_qs_N)


def outcomes_of(
    trees: Sequence[DraftTree], paths: Sequence[Sequence[int]], groups: Sequence[int]
) -> Outcomes:
    """What the walks down some trees say.

    Args:
        trees: as verified.
        paths: the accepted nodes of each.
        groups: the sampling group of each.
    """
    found: list[tuple[int, int, bool, float, float, bool]] = []
    for tree, path, group in zip(trees, paths, groups, strict=True):
        accepted, on_path = {*path}, set(tree.top1_path)
        found.extend(
            (
                group,
                tree.depths[node],
                parent in on_path,
                tree.log_probs[node],
                tree.scores[parent],
                node in accepted,
            )
            for node, parent in enumerate(tree.parents[1:], start=1)
        )
    columns = zip(*found, strict=True) if found else ((),) * 6
    groups, depths, on_path, log_qs, parent_scores, accepted = columns
    return Outcomes(
        groups_N=np.array(groups, np.intp),
        depths_N=np.array(depths, np.intp),
        on_path_N=np.array(on_path, np.intp),
        log_qs_N=np.array(log_qs, np.float64),
        parent_scores_N=np.array(parent_scores, np.float64),
        accepted_N=np.array(accepted, np.bool_),
    )


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
        """Outcomes remembered by the scores of their parents, old ones at a discount."""
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
        depths = np.arange(log_probs_RDK.shape[1])
        groups = groups_R[:, None]
        return PathScores(
            off_RDK=self._scaled(log_probs_RDK, self._maps[groups, depths, 0], below, weight),
            on_RDK=self._scaled(log_probs_RDK, self._maps[groups, depths, 1], below, weight),
        )

    def log_scores_after(
        self,
        log_probs_NK: NDArray[np.floating],
        groups_N: NDArray[np.integer],
        depth: int,
        on_path_N: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """Log acceptance of the candidates after some parents, in the order of their own.

        Args:
            log_probs_NK: the drafter's log-probabilities, in any order along K.
            groups_N: the sampling group of each parent's row.
            depth: of the candidates.
            on_path_N: whether the parent lies on the top-1 path.
        """
        below, weight = self._place(log_probs_NK)
        maps = self._maps[groups_N, depth - 1, on_path_N.astype(np.intp)]
        return self._scaled(log_probs_NK, maps, below, weight)

    def observe(self, outcomes: Outcomes) -> None:
        """Take in the outcomes of one step."""
        if outcomes.num_outcomes:
            below, weight = self._place(outcomes.log_qs_N)
            maps = outcomes.groups_N, outcomes.depths_N - 1, outcomes.on_path_N
            for knots, share in ((below, 1 - weight), (below + 1, weight)):
                np.add.at(self._trials, (*maps, knots), share * outcomes.parent_scores_N)
                np.add.at(self._successes, (*maps, knots), share * outcomes.accepted_N)
            self._seen.update(outcomes.groups_N.tolist())
        self._steps += 1
        is_due = self._steps % REFRESH_STEPS == 0
        if is_due:
            self._trials *= FORGET_PER_REFRESH
            self._successes *= FORGET_PER_REFRESH
        if is_due or self._steps < REFRESH_STEPS:
            for group in self._seen:
                self._maps[group] = self._fitted(group)

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, JSON-able; `from_dict` reads it back."""
        return {
            "version": VERSION,
            "knots": KNOTS.tolist(),
            "trials": self._trials.round(3).tolist(),
            "successes": self._successes.round(3).tolist(),
        }

    @classmethod
    def from_dict(cls, max_depth: int, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote for a drafter of the same depth.

        Raises:
            ValueError: it is something else.
        """
        model = cls(max_depth)
        if data.get("version") != VERSION or data.get("knots") != KNOTS.tolist():
            raise ValueError(f"acceptance of version {data.get('version')}; this is {VERSION}")
        trials, successes = (np.array(data.get(k), float) for k in ("trials", "successes"))
        if trials.shape != model._trials.shape or successes.shape != trials.shape:
            raise ValueError(f"acceptance of shape {trials.shape}, not {model._trials.shape}")
        if not (np.isfinite(trials) & np.isfinite(successes)).all() or (trials < 0).any():
            raise ValueError("acceptance of trials or successes that are not numbers of any")
        model._trials, model._successes = trials, np.maximum(successes, 0)
        model._seen = set(np.flatnonzero(trials.sum((1, 2, 3))).tolist())
        for group in model._seen:
            model._maps[group] = model._fitted(group)
        return model

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
        log_probs: NDArray[np.floating],
        maps: NDArray[np.float64],
        below: NDArray[np.intp],
        weight: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """By the maps `[..., B]` of the children `[..., K]` of some parents."""
        low = np.take_along_axis(maps, below, -1)
        high = np.take_along_axis(maps, below + 1, -1)
        acceptance = low + weight * (high - low)
        under = log_probs < self._log_knots[0]  # too rare to have been seen: in proportion
        acceptance = np.where(under, low * np.exp(log_probs) / KNOTS[0], acceptance)
        acceptance /= np.maximum(acceptance.sum(-1, keepdims=True), 1.0)
        with np.errstate(divide="ignore"):
            return np.log(np.minimum(acceptance, MAX_ACCEPTANCE))

    def _fitted(self, group: int) -> NDArray[np.float64]:
        """The nearest increasing map to the shrunk frequencies (isotonic regression), `[D, P, B]`.

        Pool-adjacent-violators by its max-min formula, all maps at once.
        """
        weights = self._trials[group] + PRIOR_WEIGHT
        sums = self._successes[group] + PRIOR_WEIGHT * self._scaled_prior(group)
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

    def _scaled_prior(self, group: int) -> NDArray[np.float64]:
        """The prior times the share of it that came true, `[D, P, B]`.

        The share is of a depth and path, shrunk to that of the whole group.
        """
        expected_DP = (self._trials[group] * self._prior).sum(-1)
        successes_DP = self._successes[group].sum(-1)
        share = (successes_DP.sum() + SHARE_WEIGHT) / (expected_DP.sum() + SHARE_WEIGHT)
        share_DP = (successes_DP + SHARE_WEIGHT * share) / (expected_DP + SHARE_WEIGHT)
        return np.minimum(self._prior * share_DP[..., None], MAX_ACCEPTANCE)
