"""The budget is the brute-force best, and a drafter that does not pay costs next to nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.budget import (
    BatchGates,
    DraftDepths,
    PlainProbes,
    RowGates,
    best_budget,
)

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


# Whether to draft at all

MAX_WAIT = 256


class Batch:
    """Gates of a batch and how often they let the drafter run."""

    def __init__(self) -> None:
        self.gates = BatchGates()

    def run(self, num_steps: int, gain, num_rows: int = 1) -> int:
        """Drafted steps, of `num_steps`; `gain(number)` is the share by which one was faster."""
        gain = gain if callable(gain) else (lambda _, g=gain: g)
        drafted = 0
        for number in range(num_steps):
            if self.gates.wants_draft(num_rows):
                drafted += 1
                self.gates.observe(num_rows, 1 + gain(number), 1.0)
        return drafted


def noisy(mean: float, noise: float, seed: int = 0):
    """Gains about a mean; a step takes at most 20 times as long as a plain one."""
    generator = np.random.default_rng(seed)
    return lambda _: max(mean + noise * generator.standard_normal(), -0.95)


@pytest.mark.parametrize("gain", [-0.001, -0.015, -0.1, -0.3, -0.7])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_useless_drafter_costs_under_two_percent_of_the_time(gain, noise, num_rows):
    gain_of = noisy(gain, noise / num_rows**0.5)
    num_drafted = Batch().run(10_000, gain_of, num_rows)
    assert num_drafted >= 1
    lost = num_drafted * (1 / (1 + gain) - 1)
    assert lost < 0.02 * 10_000


def test_a_good_drafter_survives_a_bad_start():
    """Cold kernels and caches: a slow step does not end a trial of a batch."""
    gains = [0.0, -0.22, -0.1, 0.1, 0.0, 0.2]
    assert Batch().run(100, lambda number: gains[number] if number < 6 else 0.1, 16) == 100


@pytest.mark.parametrize("gain", [-0.1, -0.3, -0.7])
def test_the_first_500_steps_are_not_spoilt_either(gain):
    num_drafted = Batch().run(500, noisy(gain, 0.3))
    assert num_drafted * (1 / (1 + gain) - 1) < 0.05 * 500


def trial(num_rows: int, gain: float) -> tuple[float, int]:
    """Plain steps lost in the first trial, and steps until the next one."""
    gates, lost, waited = BatchGates(), 0.0, 1
    while gates.wants_draft(num_rows):
        gates.observe(num_rows, 1 + gain, 1.0)
        lost += 1 / (1 + gain) - 1
    while not gates.wants_draft(num_rows):
        waited += 1
    return lost, waited


@pytest.mark.parametrize("gain", [-0.3, -0.45, -0.8])
def test_after_a_clear_trial_the_wait_is_as_long_as_what_it_lost_is_worth(gain):
    lost, waited = trial(64, gain)
    assert waited >= min(lost / 0.02, MAX_WAIT)


def test_bad_luck_of_a_single_row_is_followed_by_a_short_wait():
    assert trial(1, -0.45)[1] <= 16


def test_a_size_that_never_has_two_drafted_steps_in_a_row_is_judged_all_the_same():
    gates, drafted = BatchGates(), 0
    for _ in range(200):
        if gates.wants_draft(64):
            drafted += 1
            gates.observe(64, 0.7, 1.0)
        gates.wants_draft(2)  # a step that another reason makes plain
    assert drafted < 10


@pytest.mark.parametrize("gain", [0.0, 0.02, 0.5])
def test_a_drafter_that_does_not_lose_always_runs(gain):
    assert Batch().run(1_000, gain) == 1_000


@pytest.mark.parametrize("seed", range(5))
def test_a_good_drafter_runs_nearly_always_however_uneven_its_steps(seed):
    assert Batch().run(2_000, noisy(0.3, 0.4, seed)) > 0.97 * 2_000


def test_near_break_even_the_decision_seldom_changes():
    """Once in some twenty-five steps at most, where the gain of each is 0 with noise of 0.3."""
    gates, gain = BatchGates(), noisy(0.0, 0.3)
    decisions = []
    for number in range(2_000):
        decisions.append(gates.wants_draft(1))
        if decisions[-1]:
            gates.observe(1, 1 + gain(number), 1.0)
    changes = np.count_nonzero(np.diff(decisions))
    assert changes < 2_000 / 25


def test_drafting_starts_at_once():
    assert BatchGates().wants_draft(1)


def test_one_bad_step_does_not_stop_a_good_drafter():
    batch = Batch()
    batch.run(50, 1.0)
    batch.gates.observe(1, 0.5, 1.0)
    assert batch.run(100, 1.0) == 100


@pytest.mark.parametrize("bad", [-0.1, -0.5, -0.9])
def test_drafting_comes_back_after_a_wait_when_it_pays_again(bad):
    batch = Batch()
    batch.run(2_000, bad)
    steps = 0
    while batch.run(20, 0.5) < 20:
        steps += 20
        assert steps <= MAX_WAIT + 20


def test_after_recovery_a_new_doubt_is_short():
    """The wait starts over once drafting pays again."""
    batch = Batch()
    batch.run(2_000, -0.5)
    batch.run(MAX_WAIT + 200, 0.5)
    while batch.gates.wants_draft(1):
        batch.gates.observe(1, 0.2, 1.0)
    waited = 1
    while not batch.gates.wants_draft(1):
        waited += 1
    assert waited <= 16


def test_another_batch_size_is_tried_at_once():
    """What does not pay at 16 rows may at 4: as in the tail of a job."""
    batch = Batch()
    batch.run(2_000, -0.3, num_rows=16)
    assert batch.run(10, 0.5, num_rows=7) == 10
    assert batch.run(10, 0.5, num_rows=4) == 10, "sizes within a factor of two share what they know"
    assert batch.run(MAX_WAIT, -0.3, num_rows=17) <= 4, "and 16 rows are not forgotten"


def test_a_size_that_comes_and_goes_is_not_tried_every_time():
    batch = Batch()
    drafted = sum(
        batch.run(1, -0.5, num_rows=7) + batch.run(1, -0.5, num_rows=8) for _ in range(1_000)
    )
    assert drafted < 0.025 * 2_000


# Which rows to draft


def test_a_row_that_never_gains_is_left_out_and_tried_again():
    gates = RowGates()
    counts = {1: 0, 2: 0}
    for _ in range(500):
        keys = [2, 1]
        drafted = [keys[place] for place in gates.wanting(keys)]
        for key in drafted:
            counts[key] += 1
        gates.observe(drafted, [0.8 if key == 1 else -0.2 for key in drafted])
    assert counts[1] == 500
    assert 3 <= counts[2] < 50


def test_rows_are_drafted_a_little_deeper_than_their_trees_go():
    depths = DraftDepths(8)
    assert depths.of([1, 2]) == [8, 8], "nothing is known of a new row"
    for _ in range(20):
        depths.of([1, 2])
        depths.observe([1, 2], [1, 7])
    assert depths.of([1, 2]) == [2, 8]
    depths.observe([1], [2])
    assert depths.of([1, 2]) == [3, 8], "a tree that reached its row's depth may go on"
    depths.observe([2], [0])
    assert depths.of([1, 2]) == [3, 6], "one shallow tree takes little away"


def test_a_new_row_begins_where_rows_of_such_a_batch_are():
    depths = DraftDepths(8)
    for _ in range(9):
        depths.of([1, 2])
        depths.observe([1, 2], [0, 1])
    assert depths.of([1]) == [1]
    assert depths.of([3, 4]) == [2, 2], "the mean, rounded up; row 1 is forgotten"
    assert depths.of([5]) == [8], "of another batch size nothing is known"


def test_rows_that_leave_are_forgotten():
    gates = RowGates()
    for _ in range(50):
        if gates.wanting([5]):
            gates.observe([5], [-1.0])
    assert gates.wanting([5]) == []
    assert gates.wanting([6]) == [0]
    assert gates.wanting([5]) == [0], "a row that comes back is new"


def test_a_good_drafter_with_uneven_luck_is_not_given_up():
    """Twice the tokens of a plain step on average, from nothing accepted to seven: under 2 % of the
    steps are plain, at any batch size."""
    generator = np.random.default_rng(5)
    for num_rows in (1, 4, 16):
        gates, drafted = BatchGates(), 0
        for _ in range(2_000):
            if gates.wants_draft(num_rows):
                drafted += 1
                tokens = np.minimum(generator.geometric(0.5, num_rows), 8).mean()
                gates.observe(num_rows, tokens / 1.4, 1.0)
        assert drafted > 0.98 * 2_000, num_rows


# Plain probes


def probed(probes: PlainProbes, num_steps: int, gain: float, num_rows: int = 4) -> list[int]:
    """The steps that were to be plain ones."""
    return [step for step in range(num_steps) if probes.is_due(num_rows, gain)]


def test_plain_steps_are_taken_more_and_more_seldom_where_the_gain_is_small():
    steps = probed(PlainProbes(), 2_000, 0.05)
    begun = [step for step in steps if step - 1 not in steps]
    assert begun[:4] == [8, 26, 60, 126], "after 8, 16, 32, 64 drafted steps"
    assert len(steps) == PlainProbes.LENGTH * len(begun)
    assert len(steps) < 0.02 * 2_000 + 8
    assert max(np.diff(begun)) == PlainProbes.MAX_WAIT + PlainProbes.LENGTH


def test_a_clear_gain_is_probed_once_for_each_batch_size():
    probes = PlainProbes()
    assert probed(probes, 500, 0.5) == [8, 9]
    assert probed(probes, 500, 0.5, num_rows=1) == [8, 9]
    assert probed(probes, 10, 0.1) == [0, 1], "it is in doubt again"


def test_other_plain_steps_do_as_well():
    probes = PlainProbes()
    for _ in range(50):
        assert not probed(probes, 8, 0.0)
        probes.postpone(4)
