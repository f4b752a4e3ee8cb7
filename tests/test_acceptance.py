"""Acceptance is learnt from outcomes, and whatever is learnt keeps best-first valid."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.acceptance import (
    KNOTS,
    NUM_GROUPS,
    AcceptanceModel,
    Outcome,
    sampling_group,
)
from bastion_batch.records import SamplingParams

proven = settings(derandomize=True, deadline=None, max_examples=50)
DEPTH = 3
outcomes = st.builds(
    Outcome,
    group=st.integers(0, NUM_GROUPS - 1),
    depth=st.integers(1, DEPTH),
    on_path=st.booleans(),
    log_q=st.floats(-12, 0),
    accepted=st.booleans(),
)


def marginals(seed: int, num_rows: int = 3, num_ranks: int = 20) -> np.ndarray:
    generator = np.random.default_rng(seed)
    logits = generator.uniform(0.3, 6) * generator.standard_normal((num_rows, DEPTH, num_ranks))
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.sort(-log_probs, -1).astype(np.float32)


def taught(rate, num_steps: int = 400, seed: int = 0, **fixed) -> AcceptanceModel:
    """A model that saw ten outcomes a step, accepted at `rate(q)`."""
    generator = np.random.default_rng(seed)
    model = AcceptanceModel(DEPTH)
    place = {"group": 0, "depth": 1, "on_path": True, **fixed}
    for _ in range(num_steps):
        qs = np.exp(generator.uniform(np.log(0.003), np.log(0.98), 10))
        accepted = generator.random(10) < rate(qs)
        model.observe(
            Outcome(**place, log_q=float(np.log(q)), accepted=bool(a))
            for q, a in zip(qs, accepted, strict=True)
        )
    return model


def acceptance(model: AcceptanceModel, q: float, group=0, depth=1, on_path=True) -> float:
    """What the model says of a single candidate."""
    log_probs = np.full((1, DEPTH, 1), np.log(q), np.float32)
    scores = model.log_scores(log_probs, np.array([group]))
    return float(np.exp((scores.on_RDK if on_path else scores.off_RDK)[0, depth - 1, 0]))


@proven
@given(st.lists(outcomes, max_size=200), st.integers(0, 1000))
def test_siblings_keep_their_order_and_children_never_outscore_parents(seen, seed):
    """Whatever was observed: scores decrease along ranks, are at most 0 and sum to at most 1."""
    model = AcceptanceModel(DEPTH)
    for start in range(0, len(seen), 10):
        model.observe(seen[start : start + 10])
    log_probs = marginals(seed)
    log_probs[:, :, 15:] = -np.inf
    groups = np.arange(3) + seed % 5
    for scores in model.log_scores(log_probs, groups):
        assert scores.shape == log_probs.shape
        assert (scores[:, :, :15] < 0).all()
        assert np.isneginf(scores[:, :, 15:]).all(), "what must never be a candidate is none"
        assert (np.diff(scores[:, :, :15], axis=-1) <= 1e-12).all()
        assert (np.exp(scores).sum(-1) <= 1 + 1e-9).all()


def test_before_any_outcome_the_top1_path_is_believed_and_the_rest_discounted():
    model = AcceptanceModel(DEPTH)
    for q in (0.001, 0.05, 0.3, 0.9):
        assert acceptance(model, q) == pytest.approx(q, rel=0.25)
        assert acceptance(model, q, on_path=False) < 0.7 * q


@pytest.mark.parametrize("rate", [0.3, 0.6, 1.0])
def test_what_happens_is_learnt(rate):
    """To within 0.07 after 15,000 outcomes, where the drafter overstates by up to three times."""
    model = taught(lambda q: rate * q, num_steps=1_500)
    for q in (0.1, 0.3, 0.6, 0.9):
        assert acceptance(model, q) == pytest.approx(rate * q, abs=0.07)


def test_a_map_is_increasing_even_if_the_truth_is_not():
    model = taught(lambda q: np.where(q < 0.1, 0.5, 0.2))
    learnt = [acceptance(model, float(q)) for q in KNOTS]
    assert (np.diff(learnt) >= -1e-12).all()
    assert 0.15 < acceptance(model, 0.05) < 0.5, "violators are pooled to their mean"


def test_a_few_outcomes_move_little():
    model = taught(lambda q: 0 * q, num_steps=1)
    assert acceptance(model, 0.6) > 0.4


def test_change_is_followed():
    model = taught(lambda q: 0.9 * q, num_steps=2_000)
    generator = np.random.default_rng(1)
    for _ in range(3_000):
        qs = generator.uniform(0.4, 0.8, 10)
        accepted = generator.random(10) < 0.3 * qs
        model.observe(
            Outcome(0, 1, True, float(np.log(q)), bool(a))
            for q, a in zip(qs, accepted, strict=True)
        )
    assert acceptance(model, 0.6) < 0.35


def test_groups_depths_and_paths_are_learnt_apart():
    untouched = AcceptanceModel(DEPTH)
    model = taught(lambda q: 0 * q, group=2, depth=2, on_path=False)
    assert acceptance(model, 0.6, group=2, depth=2, on_path=False) < 0.05
    for group, depth, on_path in product((0, 2, 3), (1, 2, 3), (False, True)):
        if (group, depth, on_path) != (2, 2, False):
            place = {"group": group, "depth": depth, "on_path": on_path}
            assert acceptance(model, 0.6, **place) == acceptance(untouched, 0.6, **place)


def test_rows_of_several_groups_are_scored_by_their_own():
    model = taught(lambda q: 0 * q, group=5)
    log_probs = np.repeat(marginals(0, num_rows=1), 2, 0)
    scores = model.log_scores(log_probs, np.array([5, 0])).on_RDK
    assert (scores[0, 0] < scores[1, 0]).all()
    np.testing.assert_array_equal(scores[0, 1:], scores[1, 1:])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0.0}, {"temperature": 0.3}),
        ({"temperature": 0.5}, {"temperature": 0.7}),
        ({"temperature": 1.0}, {"temperature": 1.2}),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}),
    ],
    ids=str,
)
def test_unlike_sampling_is_another_group(one, other):
    groups = [sampling_group(SamplingParams(**params)) for params in (one, other)]
    assert groups[0] != groups[1]
    assert all(0 <= group < NUM_GROUPS for group in groups)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0.1}, {"temperature": 0.5}),
        ({"temperature": 0.6}, {"temperature": 1.0}),
        ({"temperature": 0.8, "top_k": 5}, {"temperature": 0.8, "min_p": 0.1}),
    ],
    ids=str,
)
def test_like_sampling_shares_a_group(one, other):
    groups = [sampling_group(SamplingParams(**params)) for params in (one, other)]
    assert groups[0] == groups[1]
