"""Draft trees: which continuations of all live rows to verify, best first.

A drafter scores every depth once for all parents, so a path is a string of ranks and its score is
the sum of one log-probability per depth. Because a child never outscores its parent, the best N
paths of a row always form a tree, and the best N of a whole batch form a forest: every prefix of
`best_first` is one. All decoding methods are stopping rules on that one sequence.

Shape letters: R rows, D draft depth, K ranks kept per depth, N nodes. Roots are not nodes.
Sources: BASTION (arXiv 2605.29727), DDTree (arXiv 2604.12989); the merge over rows is ours.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.compiled import compiled


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
    """Among its siblings: 0 for the most probable."""
    log_scores_N: NDArray[np.float64]
    """Of the whole path."""
    log_probs_N: NDArray[np.float64]
    """The drafter's, of the candidate alone."""
    columns_N: NDArray[np.int32]
    """Where its token is along K; the rank, where no score depends on the parent."""

    def __len__(self) -> int:  # type: ignore[override] - the number of candidates, not of fields
        """How many candidates there are."""
        return self.rows_N.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One row's tree. Node 0 is the root (parent and rank -1); parents come first."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    scores: list[float] = field(default_factory=lambda: [1.0])
    """How probable it is thought that each node is accepted; 1 for the root."""
    log_probs: list[float] = field(default_factory=lambda: [0.0])
    """The drafter's log-probability of every node alone."""

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.parents) - 1

    @property
    def expected_tokens(self) -> float:
        """One for the bonus token plus the score of every node."""
        return sum(self.scores)

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

    One heap for all rows: the best candidates not yet seen are the next sibling and the first child
    of those that were.

    Args:
        log_probs_RDK: log-probabilities, at most 0, decreasing along K; -inf for "never".
        max_depths: the deepest node allowed in each row.
        max_candidates: how many to return at most; None with `max_per_row`, for all it finds.
        leaves_RDK: marks tokens after which nothing can follow, such as stop tokens.
        scores: what ranks the candidates; `log_probs_RDK` itself if None.
        max_per_row: the best so many of every row at most.
    """
    num_rows, max_depth, _ = log_probs_RDK.shape
    per_row = max_candidates if max_per_row is None else max_per_row
    assert per_row is not None, "one of the two limits is needed"
    in_all = num_rows * per_row if max_candidates is None else max_candidates
    if leaves_RDK is None:
        leaves_RDK = np.zeros(log_probs_RDK.shape, np.bool_)
    off, on = scores or PathScores(log_probs_RDK, log_probs_RDK)
    rows, parents, depths, ranks, paths = _expand(
        np.ascontiguousarray(off, np.float64),
        np.ascontiguousarray(on, np.float64),
        np.ascontiguousarray(np.minimum(max_depths, max_depth), np.int64),
        np.ascontiguousarray(leaves_RDK),
        in_all,
        per_row,
    )
    own = log_probs_RDK[rows, depths - 1, ranks].astype(np.float64)
    return Candidates(rows, parents, depths, ranks, paths, own, columns_N=ranks)


@compiled()
def _expand(off_RDK, on_RDK, max_depths, leaves_RDK, in_all, per_row):  # noqa: ANN001, ANN202
    """Rows, parents, depths, ranks and path scores of the best candidates.

    What waits in the heap is (negative score, number, row, parent, depth, rank, whether the parent
    is on the top-1 path, score of the parent's path); of equal scores the first one is taken first.
    """
    num_rows, _, num_ranks = off_RDK.shape
    found = np.empty((4, in_all), np.int32)
    paths = np.empty(in_all, np.float64)
    left = np.full(num_rows, per_row)
    heap = [(0.0, -1, 0, 0, 0, 0, True, 0.0)]
    heap.pop()  # it was there for its type
    for row in range(num_rows):
        if max_depths[row] > 0 and on_RDK[row, 0, 0] > -np.inf:
            heappush(heap, (-on_RDK[row, 0, 0], row, row, -1, 1, 0, True, 0.0))
    number = num_rows
    count = 0
    while len(heap) > 0 and count < in_all:
        negative, _, row, parent, depth, rank, on_path, base = heappop(heap)
        if left[row] == 0:
            continue
        left[row] -= 1
        found[0, count], found[1, count] = row, parent
        found[2, count], found[3, count] = depth, rank
        paths[count] = -negative
        if rank + 1 < num_ranks:
            scores = on_RDK if on_path else off_RDK
            own = scores[row, depth - 1, rank + 1]
            if own > -np.inf:
                score = base + own
                heappush(heap, (-score, number, row, parent, depth, rank + 1, on_path, base))
        if depth < max_depths[row] and not leaves_RDK[row, depth - 1, rank]:
            follows = on_path and rank == 0
            scores = on_RDK if follows else off_RDK
            own = scores[row, depth, 0]
            if own > -np.inf:
                score = own - negative
                heappush(heap, (-score, number + 1, row, count, depth + 1, 0, follows, -negative))
        number += 2
        count += 1
    return found[0, :count], found[1, :count], found[2, :count], found[3, :count], paths[:count]


def take_first(candidates: Candidates, num_nodes: int) -> NDArray[np.intp]:
    """The best `num_nodes` of the whole batch (BASTION)."""
    return np.arange(min(num_nodes, len(candidates)))


def take_per_row(candidates: Candidates, num_nodes: int) -> NDArray[np.intp]:
    """The best `num_nodes` of every row (DDTree)."""
    return first_of_each_row(candidates.rows_N, num_nodes)


def first_of_each_row(rows_N: NDArray[np.integer], count: int) -> NDArray[np.intp]:
    """Where the first `count` of every row are, in order."""
    by_row = np.argsort(rows_N, kind="stable")
    rows = rows_N[by_row]
    order = np.arange(len(rows)) - np.searchsorted(rows, rows)
    return np.sort(by_row[order < count])


def largest_trees(candidates: Candidates) -> NDArray[np.int64]:
    """Nodes of the largest tree among the first 0, 1, ..., N candidates: `[N + 1]`."""
    rows_N = candidates.rows_N
    order = np.argsort(rows_N, kind="stable")
    starts = np.flatnonzero(np.diff(rows_N[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    within_N = np.empty(len(order), np.int64)
    within_N[order] = np.arange(len(order)) - np.repeat(starts, counts)
    return np.maximum.accumulate(np.concatenate([[0], within_N + 1]))


def plant(candidates: Candidates, taken: NDArray[np.intp], num_rows: int) -> list[DraftTree]:
    """The trees of the taken candidates, one per row, in admission order.

    Requires that the parent of every taken candidate is taken too.
    """
    parents: list[list[int]] = [[-1] for _ in range(num_rows)]
    depths: list[list[int]] = [[0] for _ in range(num_rows)]
    ranks: list[list[int]] = [[-1] for _ in range(num_rows)]
    scores: list[list[float]] = [[1.0] for _ in range(num_rows)]
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
        scores[row].append(score)
        log_probs[row].append(log_prob)
    parts = zip(parents, depths, ranks, scores, log_probs, strict=True)
    return [DraftTree(*tree) for tree in parts]


def token_ids_of(
    candidates: Candidates, taken: NDArray[np.intp], token_ids_RDK: NDArray[np.integer]
) -> list[list[int]]:
    """Tokens of the taken candidates, one list per row, in the order in which they are planted."""
    rows_N = candidates.rows_N[taken]
    ids_N = token_ids_RDK[rows_N, candidates.depths_N[taken] - 1, candidates.columns_N[taken]]
    by_row = np.argsort(rows_N, kind="stable")
    ends = np.searchsorted(rows_N[by_row], np.arange(1, len(token_ids_RDK)))
    return [ids.tolist() for ids in np.split(ids_N[by_row], ends)]
