"""Draft trees: which continuations of all live rows to verify, best first.

A drafter scores every depth once for all parents, so a path is a string of ranks and its score is
the sum of one log-probability per depth. Because a child never outscores its parent, the best N
paths of a row always form a tree, and the best N of a whole batch form a forest: every prefix of
`best_first` is one. All decoding methods are stopping rules on that one sequence.

Shape letters: R rows, D draft depth, K ranks kept per depth, N nodes. Roots are not nodes.
Sources: BASTION (arXiv 2605.29727), DDTree (arXiv 2604.12989); the merge over rows is ours.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PathScores(NamedTuple):
    """Log scores of candidates where they depend on their parent's place.

    Both decrease along K and are at most 0.
    """

    off_RDK: NDArray[np.floating]
    """Where the parent is off the path of most probable tokens."""
    on_RDK: NDArray[np.floating]
    """Where it is on it, or is the root."""


class Candidates(NamedTuple):
    """Scored continuations of all rows, best first; parents come before their children.

    `parents_N` holds an index into these same arrays, or -1 for a child of its row's root.
    """

    rows_N: NDArray[np.int32]
    parents_N: NDArray[np.int32]
    depths_N: NDArray[np.int32]
    ranks_N: NDArray[np.int32]
    log_scores_N: NDArray[np.float64]
    """Of the whole path."""
    log_probs_N: NDArray[np.float64]
    """The drafter's, of the candidate alone."""

    def __len__(self) -> int:  # type: ignore[override] - the number of candidates, not of fields
        """How many candidates there are."""
        return self.rows_N.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One row's tree. Node 0 is the root (parent and rank -1); parents come first."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    expected_tokens: float = 1.0
    """One for the bonus token plus the score of every node's path."""
    log_probs: list[float] = field(default_factory=lambda: [0.0])
    """The drafter's log-probability of every node alone."""

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.parents) - 1

    @property
    def top1_path(self) -> list[int]:
        """The root and the nodes that follow the most probable token of every position."""
        path = [0]
        for child, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if rank == 0 and parent == path[-1]:
                path.append(child)
        return path

    @property
    def top1_depth(self) -> int:
        """Depth to which the most probable token of every position is in the tree."""
        return len(self.top1_path) - 1

    @property
    def expected_tokens_raw(self) -> float:
        """One plus the product of the drafter's own probabilities along every node's path."""
        paths = [0.0]
        for parent, log_prob in zip(self.parents[1:], self.log_probs[1:], strict=True):
            paths.append(paths[parent] + log_prob)
        return float(np.exp(paths).sum())

    def ancestors_NN(self) -> NDArray[np.bool_]:
        """Row n marks the nodes that node n attends to: itself and its ancestors."""
        ancestors_NN = np.eye(len(self.parents), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors_NN[node] |= ancestors_NN[parent]
        return ancestors_NN


ROOT_ONLY = DraftTree([-1], [0], [-1])
"""A tree without nodes: plain decoding."""


def best_first(
    log_probs_RDK: NDArray[np.floating],
    max_depths: NDArray[np.integer],
    max_candidates: int | None,
    leaves_RDK: NDArray[np.bool_] | None = None,
    *,
    scores: PathScores | None = None,
    max_per_row: int | None = None,
) -> Candidates:
    """The `max_candidates` best continuations over all rows, best first.

    Works level by level: of a row's candidates at one depth that share a list of scores, the child
    at rank k of the i-th best parent can only be among the row's best N if i * k <= N, which
    leaves about N ln N per level.

    Args:
        log_probs_RDK: log-probabilities, at most 0, decreasing along K; -inf for "never".
        max_depths: the deepest node allowed in each row.
        max_candidates: how many to return at most; None with `max_per_row`, for all it finds.
        leaves_RDK: marks tokens after which nothing can follow, such as stop tokens.
        scores: what ranks the candidates; `log_probs_RDK` itself if None.
        max_per_row: the sequence holds at least the best so many of every row, and may leave out
            what is not among them.
    """
    limits = [limit for limit in (max_candidates, max_per_row) if limit is not None]
    assert limits, "one of the two limits is needed"
    most_in_row = min(limits)
    num_rows, max_depth, _ = log_probs_RDK.shape
    if leaves_RDK is None:
        leaves_RDK = np.zeros(log_probs_RDK.shape, np.bool_)
    scores = scores or PathScores(log_probs_RDK, log_probs_RDK)
    levels = [_roots(num_rows)]
    threshold = -np.inf
    for depth in range(1, max_depth + 1):
        above = levels[-1]
        may_grow = max_depths[above.rows] >= depth
        if depth > 1:
            may_grow &= ~leaves_RDK[above.rows, depth - 2, above.ranks]
        level = _children(above, may_grow, scores, depth, most_in_row, threshold)
        if not level.scores.size:
            break
        levels.append(level)
        found = np.concatenate([part.scores for part in levels[1:]])
        if max_candidates is not None and found.size >= max_candidates:
            threshold = np.partition(found, -max_candidates)[-max_candidates]
    return _merge(levels, log_probs_RDK, max_candidates)


class _Level(NamedTuple):
    """Candidates of one depth. `parents` index the level above."""

    rows: NDArray[np.int32]
    parents: NDArray[np.int32]
    ranks: NDArray[np.int32]
    scores: NDArray[np.float64]
    on_path: NDArray[np.bool_]


def _roots(num_rows: int) -> _Level:
    nowhere = np.full(num_rows, -1, np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    return _Level(rows, nowhere, nowhere, np.zeros(num_rows), np.ones(num_rows, np.bool_))


def _children(
    above: _Level,
    may_grow: NDArray[np.bool_],
    scores: PathScores,
    depth: int,
    most_in_row: int,
    threshold: float,
) -> _Level:
    allowed = np.where(may_grow, scores.on_RDK.shape[2], 0)
    num_children = np.minimum(allowed, most_in_row // (_order_in_row(above) + 1))
    parents = np.repeat(np.arange(len(above.rows), dtype=np.int32), num_children)
    first = np.cumsum(num_children) - num_children
    ranks = np.arange(len(parents), dtype=np.int32) - np.repeat(first, num_children)
    rows, on_path = above.rows[parents], above.on_path[parents]
    own = scores.off_RDK[rows, depth - 1, ranks]
    if scores.on_RDK is not scores.off_RDK:
        own = np.where(on_path, scores.on_RDK[rows, depth - 1, ranks], own)
    paths = above.scores[parents] + own
    keep = (paths >= threshold) & (paths > -np.inf)
    return _Level(
        rows[keep],
        parents[keep],
        ranks[keep].astype(np.int32),
        paths[keep],
        (on_path & (ranks == 0))[keep],
    )


def _order_in_row(level: _Level) -> NDArray[np.intp]:
    """The place of each candidate among those of its row whose children have the same scores.

    That is by decreasing score, the one candidate on the top-1 path apart: it is first.
    """
    by_row = np.lexsort((-level.scores, ~level.on_path, level.rows))
    rows = level.rows[by_row]
    start = np.searchsorted(rows, rows)
    order = np.empty(len(rows), np.intp)
    order[by_row] = np.arange(len(rows)) - start
    has_path = np.bincount(level.rows[level.on_path], minlength=rows.max(initial=0) + 1)
    return np.maximum(order - has_path[level.rows], 0)


def _merge(
    levels: list[_Level], log_probs_RDK: NDArray[np.floating], max_candidates: int | None
) -> Candidates:
    """Sort all levels by score, parents before children at equal scores, and renumber parents."""
    sizes = [len(level.rows) for level in levels]
    starts = np.cumsum([0, *sizes])
    scores = np.concatenate([level.scores for level in levels[1:]] or [np.zeros(0)])
    order = np.argsort(-scores, kind="stable")[:max_candidates]
    place = np.full(starts[-1], -1, np.int32)  # of every candidate, roots included, in the result
    place[order + sizes[0]] = np.arange(len(order), dtype=np.int32)

    def gather(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
        return np.concatenate([np.zeros(0, np.int32), *parts])[order]

    parents = gather([part.parents + starts[i] for i, part in enumerate(levels[1:])])
    rows = gather([part.rows for part in levels[1:]])
    depths = gather([np.full(n, d, np.int32) for d, n in enumerate(sizes) if d])
    ranks = gather([part.ranks for part in levels[1:]])
    log_probs = log_probs_RDK[rows, depths - 1, ranks].astype(np.float64)
    return Candidates(rows, place[parents], depths, ranks, scores[order], log_probs)


def take_first(candidates: Candidates, num_nodes: int) -> NDArray[np.intp]:
    """The best `num_nodes` of the whole batch (BASTION)."""
    return np.arange(min(num_nodes, len(candidates)))


def take_per_row(candidates: Candidates, num_nodes: int) -> NDArray[np.intp]:
    """The best `num_nodes` of every row (DDTree)."""
    if not len(candidates):
        return np.arange(0)
    by_row = np.argsort(candidates.rows_N, kind="stable")
    rows = candidates.rows_N[by_row]
    order = np.arange(len(rows)) - np.searchsorted(rows, rows)
    return np.sort(by_row[order < num_nodes])


def plant(candidates: Candidates, taken: NDArray[np.intp], num_rows: int) -> list[DraftTree]:
    """The trees of the taken candidates, one per row, in admission order.

    Requires that the parent of every taken candidate is taken too.
    """
    parents: list[list[int]] = [[-1] for _ in range(num_rows)]
    depths: list[list[int]] = [[0] for _ in range(num_rows)]
    ranks: list[list[int]] = [[-1] for _ in range(num_rows)]
    expected = [1.0] * num_rows
    log_probs: list[list[float]] = [[0.0] for _ in range(num_rows)]
    node_of: dict[int, int] = {-1: 0}
    chosen = zip(
        taken.tolist(),
        candidates.rows_N[taken].tolist(),
        candidates.parents_N[taken].tolist(),
        candidates.depths_N[taken].tolist(),
        candidates.ranks_N[taken].tolist(),
        np.exp(candidates.log_scores_N[taken]).tolist(),
        candidates.log_probs_N[taken].tolist(),
        strict=True,
    )
    for candidate, row, parent, depth, rank, score, log_prob in chosen:
        node_of[candidate] = len(parents[row])
        parents[row].append(node_of[parent])
        depths[row].append(depth)
        ranks[row].append(rank)
        expected[row] += score
        log_probs[row].append(log_prob)
    parts = zip(parents, depths, ranks, expected, log_probs, strict=True)
    return [DraftTree(*tree) for tree in parts]
