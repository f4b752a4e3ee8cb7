"""Trees of the whole batch are the brute-force best, whatever the ties, limits and leaves."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.tree import (
    ROOT_ONLY,
    Candidates,
    DraftTree,
    PathScores,
    best_first,
    largest_trees,
    plant,
    take_first,
    take_per_row,
)

proven = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def drafts(draw, exact_ties: bool = False):
    """`(log_probs_RDK, max_depths, leaves_RDK)` of a few small rows.

    With `exact_ties` log-probabilities are whole numbers, zero (probability 1.0) included, so that
    equal scores abound and sums are exact.
    """
    rows, depth, ranks = (draw(st.integers(1, high)) for high in (4, 3, 3))
    count = rows * depth * ranks
    one = st.integers(-3, 0).map(float) if exact_ties else st.floats(-9, 0, width=32)
    flat = draw(st.lists(one, min_size=count, max_size=count))
    log_probs = -np.sort(-np.array(flat, np.float32).reshape(rows, depth, ranks), -1)
    never = draw(st.lists(st.integers(0, ranks), min_size=rows * depth, max_size=rows * depth))
    for row, d in product(range(rows), range(depth)):
        log_probs[row, d, ranks - max(0, never[row * depth + d] - 1) :] = -np.inf
    max_depths = np.array(draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows)))
    leaves = np.array(
        draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_
    ).reshape(log_probs.shape)
    return log_probs, max_depths, leaves


def every_path(
    log_probs, max_depths, leaves, on_path=None
) -> dict[tuple[int, tuple[int, ...]], float]:
    """The score of every allowed (row, path of ranks): slow and obvious.

    `on_path` holds the scores of children of the root and of top-1 paths, if they differ.
    """
    num_rows, depth, ranks = log_probs.shape
    on_path = log_probs if on_path is None else on_path
    scores = {}
    for row in range(num_rows):
        for length in range(1, min(depth, max_depths[row]) + 1):
            for path in product(range(ranks), repeat=length):
                ends_early = any(leaves[row, d, rank] for d, rank in enumerate(path[:-1]))
                score = sum(
                    float((log_probs if any(path[:d]) else on_path)[row, d, rank])
                    for d, rank in enumerate(path)
                )
                if not ends_early and score > -np.inf:
                    scores[row, path] = score
    return scores


def paths_of(candidates: Candidates) -> list[tuple[int, tuple[int, ...]]]:
    """(row, path of ranks) of every candidate, from its parents."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(candidates.parents_N, candidates.ranks_N, strict=True):
        before = paths[parent] if parent >= 0 else ()
        paths.append((*before, int(rank)))
    return [(int(row), path) for row, path in zip(candidates.rows_N, paths, strict=True)]


def assert_a_best_forest(found: Candidates, expected: dict, max_candidates: int) -> None:
    """The candidates are distinct allowed paths with the best scores, parents first."""
    paths = paths_of(found)
    assert len(set(paths)) == len(paths), "no path twice"
    scores = [expected[path] for path in paths]  # KeyError: a path that is not allowed
    best = sorted(expected.values(), reverse=True)[:max_candidates]
    np.testing.assert_allclose(found.log_scores_N, best, atol=1e-5)
    np.testing.assert_allclose(found.log_scores_N, scores, atol=1e-5)
    assert (np.diff(found.log_scores_N) <= 0).all()
    assert (found.parents_N < np.arange(len(found))).all(), "every prefix is closed"
    assert [len(path) for _, path in paths] == found.depths_N.tolist()
    inner = found.parents_N >= 0
    assert (found.rows_N[found.parents_N[inner]] == found.rows_N[inner]).all()


@proven
@given(drafts(), st.integers(0, 60))
def test_takes_the_most_probable_paths_of_all_rows(draft, max_candidates):
    found = best_first(draft[0], draft[1], max_candidates, draft[2])
    assert_a_best_forest(found, every_path(*draft), max_candidates)


@proven
@given(drafts(exact_ties=True), st.integers(0, 60))
def test_equal_scores_never_put_a_child_before_its_parent(draft, max_candidates):
    found = best_first(draft[0], draft[1], max_candidates, draft[2])
    assert_a_best_forest(found, every_path(*draft), max_candidates)


@st.composite
def two_scores(draw):
    """Drafts of one shape whose scores differ on the top-1 path, and the drafter's own."""
    log_probs, max_depths, leaves = draw(drafts())
    size = log_probs.size
    values = draw(st.lists(st.floats(-6, 0), min_size=2 * size, max_size=2 * size))
    off, on = -np.sort(-np.array(values).reshape(2, *log_probs.shape), -1)
    return log_probs, max_depths, leaves, PathScores(off, on)


@proven
@given(two_scores(), st.integers(0, 60))
def test_scores_may_depend_on_the_top1_path(draft, max_candidates):
    log_probs, max_depths, leaves, scores = draft
    found = best_first(log_probs, max_depths, max_candidates, leaves, scores=scores)
    expected = every_path(scores.off_RDK, max_depths, leaves, scores.on_RDK)
    assert_a_best_forest(found, expected, max_candidates)
    np.testing.assert_array_equal(
        found.log_probs_N, log_probs[found.rows_N, found.depths_N - 1, found.ranks_N]
    )


@proven
@given(two_scores(), st.integers(1, 12))
def test_enough_of_every_row_is_found_when_asked(draft, max_per_row):
    """The best of each row are in the sequence, however poor beside other rows'."""
    log_probs, max_depths, leaves, scores = draft
    found = best_first(
        log_probs, max_depths, 10_000, leaves, scores=scores, max_per_row=max_per_row
    )
    expected = every_path(scores.off_RDK, max_depths, leaves, scores.on_RDK)
    assert (found.parents_N < np.arange(len(found))).all()
    for row in range(len(log_probs)):
        mine = sorted((s for (r, _), s in expected.items() if r == row), reverse=True)
        best = found.log_scores_N[found.rows_N == row][:max_per_row]
        np.testing.assert_allclose(best, mine[:max_per_row], atol=1e-5)


@proven
@given(drafts(exact_ties=True), st.integers(1, 60), st.integers(1, 60))
def test_a_smaller_budget_gives_a_prefix_of_the_scores(draft, one, other):
    small, large = sorted((one, other))
    few = best_first(draft[0], draft[1], small, draft[2])
    many = best_first(draft[0], draft[1], large, draft[2])
    np.testing.assert_array_equal(few.log_scores_N, many.log_scores_N[: len(few)])


def test_certain_tokens_make_a_chain():
    log_probs = np.full((1, 4, 3), -np.inf, np.float32)
    log_probs[:, :, 0] = 0.0
    found = best_first(log_probs, np.array([4]), 100)
    assert found.parents_N.tolist() == [-1, 0, 1, 2]
    assert found.depths_N.tolist() == [1, 2, 3, 4]
    assert found.log_scores_N.tolist() == [0.0] * 4


def test_all_ties_are_a_tree_of_the_asked_size():
    log_probs = np.zeros((3, 5, 4), np.float32)
    for size in (1, 2, 7, 50, 333):
        found = best_first(log_probs, np.array([5, 3, 0]), size)
        assert len(found) == size
        assert (found.parents_N < np.arange(size)).all()
        assert 2 not in found.rows_N, "a row of depth 0 has no candidates"


def test_rows_of_depth_zero_have_no_candidates():
    found = best_first(np.zeros((2, 3, 2), np.float32), np.zeros(2, int), 10)
    assert len(found) == 0
    assert take_per_row(found, 4).size == 0
    trees = plant(found, take_first(found, 4), 2)
    assert [tree.num_nodes for tree in trees] == [0, 0]


def test_nothing_follows_a_leaf():
    log_probs = np.log(np.array([[[0.9, 0.05], [0.9, 0.05], [0.9, 0.05]]], np.float32))
    leaves = np.zeros(log_probs.shape, np.bool_)
    leaves[0, 1, 0] = True
    paths = {path for _, path in paths_of(best_first(log_probs, np.array([3]), 99, leaves))}
    assert (0, 0) in paths
    assert not any(path[:2] in {(0, 0), (1, 0)} and len(path) == 3 for path in paths)
    assert (0, 1, 0) in paths


def test_a_large_draft_is_as_good_as_a_heap():
    """As large as a step's: 16 rows, depth 7, 64 ranks, 512 nodes."""
    import heapq

    generator = np.random.default_rng(0)
    logits = 3 * generator.standard_normal((16, 7, 64))
    log_probs = -np.sort(-(logits - np.log(np.exp(logits).sum(-1, keepdims=True))), -1)
    frontier = [(-log_probs[row, 0, 0], row, (0,)) for row in range(16)]
    heapq.heapify(frontier)
    expected = []
    while len(expected) < 512:
        negative, row, path = heapq.heappop(frontier)
        expected.append(-negative)
        depth, rank = len(path), path[-1]
        if rank + 1 < 64:
            step = log_probs[row, depth - 1, rank] - log_probs[row, depth - 1, rank + 1]
            heapq.heappush(frontier, (negative + step, row, (*path[:-1], rank + 1)))
        if depth < 7:
            heapq.heappush(frontier, (negative - log_probs[row, depth, 0], row, (*path, 0)))
    found = best_first(log_probs, np.full(16, 7), 512)
    np.testing.assert_allclose(found.log_scores_N, expected, atol=1e-9)


# Taking and planting


@proven
@given(drafts(), st.integers(0, 12))
def test_the_first_are_the_best_of_the_batch(draft, num_nodes):
    candidates = best_first(draft[0], draft[1], 40, draft[2])
    taken = take_first(candidates, num_nodes)
    assert taken.tolist() == list(range(min(num_nodes, len(candidates))))


@proven
@given(drafts(exact_ties=True), st.integers(0, 12))
def test_each_row_gets_its_own_best(draft, num_nodes):
    log_probs, max_depths, leaves = draft
    everything = best_first(log_probs, max_depths, 10_000, leaves)
    taken = take_per_row(everything, num_nodes)
    assert (np.diff(taken) > 0).all()
    expected = every_path(*draft)
    for row in range(len(log_probs)):
        mine = sorted((s for (r, _), s in expected.items() if r == row), reverse=True)
        chosen = taken[everything.rows_N[taken] == row]
        np.testing.assert_allclose(everything.log_scores_N[chosen], mine[:num_nodes], atol=1e-5)
        assert set(everything.parents_N[chosen].tolist()) <= {-1, *chosen.tolist()}


@proven
@given(two_scores(), st.integers(0, 40), st.booleans())
def test_planted_trees_are_the_taken_candidates(draft, num_nodes, per_row):
    log_probs, max_depths, leaves, scores = draft
    num_rows = len(log_probs)
    candidates = best_first(log_probs, max_depths, 60, leaves, scores=scores)
    taken = (take_per_row if per_row else take_first)(candidates, num_nodes)
    trees = plant(candidates, taken, num_rows)
    assert len(trees) == num_rows
    assert sum(tree.num_nodes for tree in trees) == len(taken)
    every = paths_of(candidates)
    probabilities = np.exp(candidates.log_scores_N)
    for row, tree in enumerate(trees):
        mine = [index for index in taken.tolist() if every[index][0] == row]
        assert paths_in(tree) == [(), *(every[index][1] for index in mine)]
        assert tree.depths == [len(path) for path in paths_in(tree)]
        assert tree.expected_tokens == pytest.approx(1 + probabilities[mine].sum())
        raw = [
            np.exp(sum(log_probs[row, depth, rank] for depth, rank in enumerate(path)))
            for path in paths_in(tree)
        ]
        assert tree.expected_tokens_raw == pytest.approx(sum(raw))
        assert tree.log_probs == [0.0, *candidates.log_probs_N[mine].tolist()]
        assert tree.top1_depth == top1_depth(paths_in(tree))


def paths_in(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of ranks of every node; asserts that parents come first."""
    assert (tree.parents[0], tree.depths[0], tree.ranks[0]) == (-1, 0, -1)
    paths: list[tuple[int, ...]] = [()]
    for node, (parent, rank) in enumerate(
        zip(tree.parents[1:], tree.ranks[1:], strict=True), start=1
    ):
        assert 0 <= parent < node
        paths.append((*paths[parent], rank))
    return paths


def top1_depth(paths: list[tuple[int, ...]]) -> int:
    return max(len(path) for path in paths if not any(path))


@proven
@given(drafts(exact_ties=True), st.integers(0, 40))
def test_a_node_sees_itself_and_its_ancestors_and_no_other(draft, num_nodes):
    candidates = best_first(draft[0], draft[1], 60, draft[2])
    for tree in plant(candidates, take_first(candidates, num_nodes), len(draft[0])):
        paths = paths_in(tree)
        expected = [[path[: len(other)] == other for other in paths] for path in paths]
        np.testing.assert_array_equal(tree.ancestors_NN(), expected)


def test_the_bare_root_expects_its_bonus_token():
    assert ROOT_ONLY.num_nodes == 0
    assert ROOT_ONLY.expected_tokens == 1.0
    assert ROOT_ONLY.top1_depth == 0
    assert ROOT_ONLY.ancestors_NN().tolist() == [[True]]


def test_largest_trees_count_the_nodes_of_the_row_with_most():
    rows = np.array([1, 1, 0, 1, 2, 0, 0, 0], np.int32)
    places, scores = np.zeros(len(rows), np.int32), np.zeros(len(rows))
    candidates = Candidates(rows, places, places, places, places, scores, scores)
    assert largest_trees(candidates).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4]
