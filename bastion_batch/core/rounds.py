"""Best-first where a candidate's score depends on its parent: asked for in rounds, one per depth.

`tree.best_first` needs every score beforehand, which it has where a depth is scored once for all
parents. Here whoever knows the scores is asked about the children of some parents, of all rows at
once and only of parents that may still matter: at most one round per depth.

Rounds find what a heap finds that asks about one parent at a time. Order all candidates by their
path's score, the best first, and of equal ones the shallower first. A child never outscores its
parent and is deeper, so it comes after it, and the best N candidates are closed under parents. What
is known after a round is a part of all there is, so a candidate among the best N of all is among
the best N of what is known: no other parent can have a child among the best N, and none is asked
about. By induction over depths, the best N of all are known after the last round. The same holds
with a limit per row, which only removes what comes after the best of its row. So a round asks about
N parents at most, and no more than N candidates are kept.

Shape letters: R rows, D draft depth, K candidates of a slot, N parents or candidates.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.tree import Candidates, first_of_each_row


class Frontier(NamedTuple):
    """The parents that one round asks about, all at one depth, of any rows."""

    depth: int
    """Of the children, from 1."""
    rows_N: NDArray[np.int32]
    columns_N: NDArray[np.int32]
    """Which of its slot's candidates each parent is; 0 for a root."""
    askers_N: NDArray[np.int32]
    """Where the parent's own parent was in the round before; 0 for a root."""
    on_path_N: NDArray[np.bool_]
    """Whether the parent is a root or on the path of most probable tokens."""


class Children(NamedTuple):
    """What a round answers: all candidates of the slot after each parent of the frontier.

    A slot's candidates have the same columns after all parents.
    """

    log_probs_NK: NDArray[np.floating]
    """The drafter's, of the candidate alone, at most 0; -inf for "never"."""
    log_scores_NK: NDArray[np.floating]
    """What ranks candidates: at most 0, and increasing with the log-probability after a parent."""


Ask = Callable[[Frontier], Children]

_NODE = np.dtype(
    [
        ("score", np.float64),
        ("log_prob", np.float64),
        ("number", np.int64),
        ("parent", np.int64),
        ("row", np.int32),
        ("depth", np.int32),
        ("rank", np.int32),
        ("column", np.int32),
        ("asker", np.int32),
        ("on_path", np.bool_),
        ("is_leaf", np.bool_),
    ]
)
"""A candidate as it is found. Numbers count from 0 in the order of finding; a child of a root has
parent -1. A root has depth 0 and number -1."""


def best_first_by_rounds(
    ask: Ask,
    max_depths: NDArray[np.integer],
    max_candidates: int | None,
    leaves_RDK: NDArray[np.bool_],
    *,
    max_per_row: int | None = None,
    max_children: int | None = None,
) -> Candidates:
    """The best continuations over all rows, best first, as `tree.best_first` finds them.

    Args:
        ask: the children of some parents; called at most once per depth, the roots first.
        max_depths: the deepest node allowed in each row.
        max_candidates: how many to return at most; None with `max_per_row`, for all it finds.
        leaves_RDK: marks tokens after which nothing can follow.
        max_per_row: the best so many of every row at most.
        max_children: the best so many after every parent at most.
    """
    num_rows, max_depth, _ = leaves_RDK.shape
    per_row = max_candidates if max_per_row is None else max_per_row
    assert per_row is not None, "one of the two limits is needed"
    in_all = num_rows * per_row if max_candidates is None else max_candidates
    max_depths = np.minimum(max_depths, max_depth)
    known = np.empty(0, _NODE)
    parents = _roots(max_depths)
    num_found = 0
    while in_all and len(parents):
        children = ask(_frontier(parents))
        worst = known["score"][-1] if len(known) == in_all else -np.inf
        found = _found(parents, children, leaves_RDK, worst, max_children)
        found["number"] = np.arange(num_found, num_found + len(found))
        num_found += len(found)
        known = _best(np.concatenate([known, found]), in_all, per_row)
        depth = parents["depth"][0] + 1
        can_follow = (max_depths > depth)[known["row"]] & ~known["is_leaf"]
        parents = known[can_follow & (known["depth"] == depth)]
    return _candidates(known, num_found)


def _roots(max_depths: NDArray[np.integer]) -> NDArray[np.void]:
    rows = np.flatnonzero(max_depths > 0)
    roots = np.zeros(len(rows), _NODE)
    roots["row"], roots["number"], roots["on_path"] = rows, -1, True
    return roots


def _frontier(parents: NDArray[np.void]) -> Frontier:
    return Frontier(
        depth=int(parents["depth"][0]) + 1,
        rows_N=parents["row"],
        columns_N=parents["column"],
        askers_N=parents["asker"],
        on_path_N=parents["on_path"],
    )


def _found(
    parents: NDArray[np.void],
    children: Children,
    leaves_RDK: NDArray[np.bool_],
    worst: float,
    max_children: int | None,
) -> NDArray[np.void]:
    """The children that are better than the worst of what is known, by parent and rank."""
    log_probs_NK, log_scores_NK = children
    columns_NK = np.argsort(-log_probs_NK, -1, kind="stable")[:, :max_children]
    scores_NK = np.take_along_axis(log_scores_NK, columns_NK, -1) + parents["score"][:, None]
    asker, rank = np.nonzero(scores_NK > worst)
    column = columns_NK[asker, rank]
    parent = parents[asker]
    found = np.empty(len(asker), _NODE)
    found["score"] = scores_NK[asker, rank]
    found["log_prob"] = log_probs_NK[asker, column]
    found["parent"], found["row"] = parent["number"], parent["row"]
    found["depth"] = parent["depth"] + 1
    found["rank"], found["column"], found["asker"] = rank, column, asker
    found["on_path"] = parent["on_path"] & (rank == 0)
    found["is_leaf"] = leaves_RDK[parent["row"], parent["depth"], column]
    return found


def _best(known: NDArray[np.void], in_all: int, per_row: int) -> NDArray[np.void]:
    """The best candidates in order. Requires shallower ones of equal scores to come first."""
    known = known[np.argsort(-known["score"], kind="stable")]
    if per_row < in_all:
        known = known[first_of_each_row(known["row"], per_row)]
    return known[:in_all]


def _candidates(known: NDArray[np.void], num_found: int) -> Candidates:
    places = np.full(num_found + 1, -1, np.int32)  # the last one for parent -1
    places[known["number"]] = np.arange(len(known))
    columns = {name: np.ascontiguousarray(known[name]) for name in _NODE.names or ()}
    return Candidates(
        rows_N=columns["row"],
        parents_N=places[columns["parent"]],
        depths_N=columns["depth"],
        ranks_N=columns["rank"],
        log_scores_N=columns["score"],
        log_probs_N=columns["log_prob"],
        columns_N=columns["column"],
    )
