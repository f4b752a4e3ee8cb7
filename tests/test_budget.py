"""The budget is the brute-force best, and a drafter that does not pay costs next to nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.budget import DraftGate, best_budget

proven = settings(derandomize=True, deadline=None, max_examples=200)
scores = st.lists(st.floats(-12, 0), max_size=30).map(lambda s: np.array(sorted(s, reverse=True)))


@proven
@given(scores, st.integers(1, 8), st.data())
def test_no_other_size_is_predicted_to_be_faster(log_scores, num_rows, data):
    """Whatever the staircase: costs need be neither convex nor increasing."""
    size = len(log_scores) + 1
    seconds = data.draw(st.lists(st.floats(1e-4, 10), min_size=size, max_size=size))
    budget = best_budget(log_scores, num_rows, np.array(seconds))
    rates = [
        (num_rows + sum(np.exp(log_scores[:n]))) / seconds[n] for n in range(len(log_scores) + 1)
    ]
    assert budget.tokens_per_second == pytest.approx(max(rates))
    assert rates[budget.num_nodes] == pytest.approx(max(rates))
    gain = num_rows + sum(np.exp(log_scores[: budget.num_nodes]))
    assert budget.expected_tokens == pytest.approx(gain)


@proven
@given(scores, st.integers(1, 8), st.floats(0, 2), st.floats(0, 2), st.floats(0, 1))
def test_dearer_nodes_never_make_a_larger_tree(log_scores, num_rows, one, other, fixed):
    def size(node_cost: float) -> int:
        nodes = np.arange(len(log_scores) + 1)
        return best_budget(log_scores, num_rows, 1 + fixed + node_cost * nodes).num_nodes

    cheap, dear = sorted((one, other))
    assert size(dear) <= size(cheap)


def test_free_nodes_are_all_taken_and_a_later_stair_is_found():
    log_scores = np.log([0.5, 0.5, 0.5, 0.5])
    assert best_budget(log_scores, 1, np.ones(5)).num_nodes == 4
    staircase = np.array([1.0, 2.0, 2.0, 2.0, 2.0])  # the first node loses, four together win
    assert best_budget(log_scores, 1, staircase).num_nodes == 4


def test_no_candidates_leave_the_bonus_tokens():
    assert best_budget(np.zeros(0), 3, np.array([0.5])) == (0, 3.0, 6.0)


def run(gate: DraftGate, num_steps: int, drafted_rate: float, plain_rate: float = 1.0) -> int:
    """Steps, of `num_steps`, in which the gate let the drafter run."""
    drafted = 0
    for _ in range(num_steps):
        if gate.wants_draft():
            drafted += 1
            gate.observe(drafted_rate, plain_rate)
    return drafted


@pytest.mark.parametrize("drafted_rate", [0.999, 0.7, 0.3])
def test_a_useless_drafter_costs_under_two_percent(drafted_rate):
    """Of the steps, and of the time: a probe commits no more tokens than a plain step."""
    num_probes = run(DraftGate(), 10_000, drafted_rate)
    assert 1 <= num_probes < 200
    assert num_probes * (1 / drafted_rate - 1) < 0.02 * 10_000


def test_a_good_drafter_always_runs():
    assert run(DraftGate(), 1_000, 1.001) == 1_000


def test_drafting_starts_at_once():
    assert DraftGate().wants_draft()


def test_one_bad_step_does_not_stop_a_good_drafter():
    gate = DraftGate()
    run(gate, 50, 2.0)
    gate.observe(0.9, 1.0)
    assert run(gate, 100, 2.0) == 100


@pytest.mark.parametrize("bad_rate", [0.9, 0.5, 0.1])
def test_drafting_comes_back_soon_after_it_pays_again(bad_rate):
    """As in the tail of a job, when the batch drains and nodes become cheap."""
    gate = DraftGate()
    run(gate, 2_000, bad_rate)
    steps = 0
    while run(gate, 20, 1.5) < 20:
        steps += 20
        assert steps <= 2 * DraftGate.MAX_WAIT, "back after a wait or two"


def test_after_recovery_a_new_doubt_is_short():
    """The wait starts over once drafting pays again."""
    gate = DraftGate()
    run(gate, 2_000, 0.5)
    run(gate, 2 * DraftGate.MAX_WAIT + 100, 1.5)
    while gate.wants_draft():
        gate.observe(0.2, 1.0)
    waited = 1
    while not gate.wants_draft():
        waited += 1
    assert waited <= 4
