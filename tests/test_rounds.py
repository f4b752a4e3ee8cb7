"""Candidates found in rounds are those of a heap that asks about one parent at a time."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.acceptance import AcceptanceModel, Outcomes
from bastion_batch.core.rounds import Children, Frontier, best_first_by_rounds
from bastion_batch.core.tree import (
    Candidates,
    best_first,
    plant,
    take_first,
    take_per_row,
    token_ids_of,
)

proven = settings(derandomize=True, deadline=None, max_examples=120)

Path = tuple[int, ...]


class Oracle:
    """Knows the scores of the children of every path of columns, and counts what it is asked.

    Args:
        num_rows: R.
        depth: D.
        num_columns: K.
        seed: of the scores.
        exact_ties: scores are whole numbers, zero included.
        never: the share of candidates that are impossible.
    """

    def __init__(self, num_rows, depth, num_columns, seed, *, exact_ties=False, never=0.1) -> None:
        self.shape = (num_rows, depth, num_columns)
        self.num_asked: list[int] = []
        self._seed, self._ties, self._never = seed, exact_ties, never
        self._before: list[Path] = []

    def log_probs(self, row: int, path: Path) -> np.ndarray:
        """Of the K children of a path: they depend on all of it."""
        random = np.random.default_rng([self._seed, row, len(path), *path])
        count = self.shape[2]
        if self._ties:
            values = random.integers(-2, 1, count).astype(float)
        else:
            values = np.log(random.dirichlet(np.full(count, 0.5)) + 1e-9).clip(max=0)
        return np.where(random.random(count) < self._never, -np.inf, values)

    def __call__(self, frontier: Frontier) -> Children:
        """Answers from what the round says of the parents alone."""
        assert frontier.depth == len(self.num_asked) + 1, "one round a depth, the roots first"
        self.num_asked.append(len(frontier.rows_N))
        if frontier.depth == 1:
            paths: list[Path] = [()] * len(frontier.rows_N)
        else:
            pairs = zip(frontier.askers_N.tolist(), frontier.columns_N.tolist(), strict=True)
            paths = [(*self._before[asker], column) for asker, column in pairs]
        self._before = paths
        answers = [
            self.log_probs(r, p) for r, p in zip(frontier.rows_N.tolist(), paths, strict=True)
        ]
        for row, path, on_path in zip(frontier.rows_N, paths, frontier.on_path_N, strict=True):
            assert on_path == self.is_top1(int(row), path)
        log_probs = np.array(answers)
        return Children(log_probs, log_probs)

    def is_top1(self, row: int, path: Path) -> bool:
        return all(
            column == np.argsort(-self.log_probs(row, path[:d]), kind="stable")[0]
            for d, column in enumerate(path)
        )


def paths_of(found: Candidates) -> list[tuple[int, Path]]:
    paths: list[Path] = []
    for parent, column in zip(found.parents_N, found.columns_N, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(column)))
    return [(int(row), path) for row, path in zip(found.rows_N, paths, strict=True)]


def every_path(oracle: Oracle, max_depths, leaves_RDK, max_children=None) -> dict:
    """The score of every allowed (row, path): slow and obvious."""
    num_rows, depth, num_columns = oracle.shape
    scores = {}
    for row in range(num_rows):
        for length in range(1, min(depth, max_depths[row]) + 1):
            for path in product(range(num_columns), repeat=length):
                score = 0.0
                for d, column in enumerate(path):
                    log_probs = oracle.log_probs(row, path[:d])
                    best = np.argsort(-log_probs, kind="stable")[:max_children]
                    score += log_probs[column] if column in best else -np.inf
                ends_early = any(leaves_RDK[row, d, c] for d, c in enumerate(path[:-1]))
                if score > -np.inf and not ends_early:
                    scores[row, path] = score
    return scores


@st.composite
def drafts(draw):
    """An oracle, `max_depths`, `leaves_RDK` of a few small rows."""
    shape = tuple(draw(st.integers(1, high)) for high in (3, 4, 3))
    seed, exact_ties = draw(st.integers(0, 9999)), draw(st.booleans())
    random = np.random.default_rng(seed)
    max_depths = random.integers(0, shape[1] + 1, shape[0])
    leaves_RDK = random.random(shape) < draw(st.sampled_from([0.0, 0.3]))
    return Oracle(*shape, seed, exact_ties=exact_ties), max_depths, leaves_RDK


def assert_well_formed(found: Candidates, oracle: Oracle) -> None:
    paths = paths_of(found)
    assert len(set(paths)) == len(paths), "no path twice"
    assert (found.parents_N < np.arange(len(found))).all(), "every prefix is closed"
    assert (np.diff(found.log_scores_N) <= 0).all()
    assert [len(path) for _, path in paths] == found.depths_N.tolist()
    inner = found.parents_N >= 0
    assert (found.rows_N[found.parents_N[inner]] == found.rows_N[inner]).all()
    for (row, path), rank, log_prob in zip(paths, found.ranks_N, found.log_probs_N, strict=True):
        log_probs = oracle.log_probs(row, path[:-1])
        assert np.argsort(-log_probs, kind="stable")[rank] == path[-1]
        assert log_prob == log_probs[path[-1]]


@proven
@given(drafts(), st.integers(0, 60), st.sampled_from([None, 1, 2]))
def test_takes_the_most_probable_paths_of_all_rows(draft, max_candidates, max_children):
    oracle, max_depths, leaves = draft
    found = best_first_by_rounds(
        oracle, max_depths, max_candidates, leaves, max_children=max_children
    )
    assert_well_formed(found, oracle)
    assert len(oracle.num_asked) <= oracle.shape[1], "at most one round a depth"
    assert max(oracle.num_asked, default=0) <= max(max_candidates, oracle.shape[0])
    expected = every_path(oracle, max_depths, leaves, max_children)
    scores = [expected[path] for path in paths_of(found)]  # KeyError: a path that is not allowed
    best = sorted(expected.values(), reverse=True)[:max_candidates]
    np.testing.assert_allclose(scores, best, atol=1e-9)
    np.testing.assert_allclose(found.log_scores_N, scores, atol=1e-9)


@proven
@given(drafts(), st.integers(1, 12), st.sampled_from([None, 5, 200]))
def test_the_best_of_every_row_are_found(draft, max_per_row, max_candidates):
    oracle, max_depths, leaves = draft
    found = best_first_by_rounds(
        oracle, max_depths, max_candidates, leaves, max_per_row=max_per_row
    )
    assert_well_formed(found, oracle)
    expected = every_path(oracle, max_depths, leaves)
    best = []
    for row in range(oracle.shape[0]):
        mine = sorted((s for (r, _), s in expected.items() if r == row), reverse=True)
        best += mine[:max_per_row]
    best = sorted(best, reverse=True)[:max_candidates]
    np.testing.assert_allclose(found.log_scores_N, best, atol=1e-9)


def heap_best_first(oracle: Oracle, max_candidates: int) -> tuple[list[tuple[int, Path]], int]:
    """Best-first as the papers have it: the children of a node are asked for when it is taken.

    Returns the paths and about how many parents was asked.
    """
    num_rows, depth, _ = oracle.shape
    heap = [(0.0, row, ()) for row in range(num_rows)]
    paths, num_asked = [], 0
    while heap and len(paths) < max_candidates:
        negative, row, path = heapq.heappop(heap)
        if path:
            paths.append((row, path))
        if len(path) < depth:
            num_asked += 1
            for column, log_prob in enumerate(oracle.log_probs(row, path)):
                if log_prob > -np.inf:
                    heapq.heappush(heap, (negative - log_prob, row, (*path, column)))
    return paths, num_asked


@pytest.mark.parametrize(("rows", "nodes"), [(1, 64), (8, 128), (8, 40)])
def test_a_large_draft_is_the_tree_of_a_heap(rows, nodes):
    """As large as a step's, and asked about few parents more."""
    oracle = Oracle(rows, 7, 16, seed=rows + nodes, never=0.0)
    expected, num_asked = heap_best_first(oracle, nodes)
    found = best_first_by_rounds(oracle, np.full(rows, 7), nodes, np.zeros(oracle.shape, np.bool_))
    assert paths_of(found) == expected
    assert len(oracle.num_asked) <= 7
    assert sum(oracle.num_asked) < 3 * num_asked


def test_scores_without_a_parent_give_the_factorised_trees():
    """What does not depend on the parent is the special case that `best_first` is for."""
    random = np.random.default_rng(3)
    log_probs = -np.sort(-np.log(random.dirichlet(np.ones(6), (4, 5))), -1)
    leaves = random.random(log_probs.shape) < 0.1
    max_depths = np.array([5, 3, 0, 4])

    def ask(frontier: Frontier) -> Children:
        values = log_probs[frontier.rows_N, frontier.depth - 1]
        return Children(values, values)

    for per_row in (None, 9):
        expected = best_first(log_probs, max_depths, 50, leaves, max_per_row=per_row)
        found = best_first_by_rounds(ask, max_depths, 50, leaves, max_per_row=per_row)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)
            assert one.dtype == other.dtype


def test_nothing_is_asked_where_nothing_is_wanted():
    def ask(_frontier):
        raise AssertionError("asked")

    leaves = np.zeros((2, 3, 4), np.bool_)
    assert len(best_first_by_rounds(ask, np.zeros(2, int), 9, leaves)) == 0
    assert len(best_first_by_rounds(ask, np.full(2, 3), 0, leaves)) == 0


def test_what_is_impossible_is_not_a_candidate_nor_asked_about():
    def ask(frontier: Frontier) -> Children:
        log_probs = np.full((len(frontier.rows_N), 3), -np.inf)
        log_probs[:, 1] = -1.0
        return Children(log_probs, log_probs)

    found = best_first_by_rounds(ask, np.full(2, 4), 99, np.zeros((2, 4, 3), np.bool_))
    assert found.columns_N.tolist() == [1] * 8
    assert found.ranks_N.tolist() == [0] * 8


@proven
@given(drafts(), st.integers(1, 40), st.booleans())
def test_the_nodes_of_a_tree_carry_the_tokens_of_their_columns(draft, num_nodes, per_row):
    oracle, max_depths, leaves = draft
    found = best_first_by_rounds(oracle, max_depths, 60, leaves)
    taken = (take_per_row if per_row else take_first)(found, num_nodes)
    num_rows = oracle.shape[0]
    ids_RDK = np.arange(leaves.size).reshape(leaves.shape)
    tokens = token_ids_of(found, taken, ids_RDK)
    trees = plant(found, taken, num_rows)
    paths = paths_of(found)
    for row, tree in enumerate(trees):
        mine = [paths[index][1] for index in taken.tolist() if paths[index][0] == row]
        assert tree.depths[1:] == [len(path) for path in mine]
        assert tokens[row] == [ids_RDK[row, len(path) - 1, path[-1]] for path in mine]
        top1 = [path for path in mine if oracle.is_top1(row, path)]
        assert tree.top1_depth == len(top1)


# The acceptance of candidates that depend on their parent


def learnt() -> AcceptanceModel:
    """A model that has seen that q overstates, most of all off the path."""
    model = AcceptanceModel(3)
    random = np.random.default_rng(0)
    for _ in range(40):
        log_qs = np.log(random.random(300))
        on_path = random.integers(0, 2, 300)
        accepted = random.random(300) < np.exp(log_qs) * np.where(on_path, 0.8, 0.3)
        depths = random.integers(1, 4, 300)
        model.observe(Outcomes(np.full(300, 2), depths, on_path, log_qs, np.ones(300), accepted))
    return model


def test_children_are_scored_as_those_of_marginals_are():
    model, random = learnt(), np.random.default_rng(1)
    log_probs = -np.sort(-np.log(random.dirichlet(np.ones(7), (4, 3)) + 1e-12), -1)
    groups = np.array([2, 0, 2, 1])
    off, on = model.log_scores(log_probs, groups)
    for depth in (1, 2, 3):
        for scores, is_on in ((off, False), (on, True)):
            shuffled = random.permutation(7)
            found = model.log_scores_after(
                log_probs[:, depth - 1, shuffled], groups, depth, np.full(4, is_on)
            )
            np.testing.assert_allclose(found, scores[:, depth - 1, shuffled], atol=1e-12)


def test_a_child_never_outscores_its_parent_and_siblings_keep_their_order():
    model, random = learnt(), np.random.default_rng(2)
    log_probs = np.log(random.dirichlet(np.full(16, 0.2), 50) + 1e-30)
    log_probs[:, 3] = -np.inf
    for depth, is_on in product((1, 2, 3), (False, True)):
        scores = model.log_scores_after(log_probs, np.full(50, 2), depth, np.full(50, is_on))
        assert (scores <= 0).all()
        assert (np.exp(scores).sum(-1) <= 1 + 1e-9).all()
        assert (scores[:, 3] == -np.inf).all()
        order = np.argsort(-log_probs, -1, kind="stable")
        assert (np.diff(np.take_along_axis(scores, order, -1)[:, :-1]) <= 1e-12).all()
