"""Thousands of small jobs on a simulated clock: whatever dies and whenever, each ends right.

A failure prints its seed and what happened; `simulation.schedules.run(seed, directory)` repeats it.
"""

import logging

import pyarrow as pa
import pytest
from fault_store import Fault
from simulation.sabotage import SABOTAGE
from simulation.schedules import run
from simulation.world import Violation

NUM_FAST = 60
NUM_SLOW = 2_000
NUM_PER_TEST = 200
MAX_SEEDS_OF_A_BUG = 100
WRITES = [("put_if_absent", "data"), ("put", "steps"), ("put", "_bastion")]
"""Each goes wrong in every way within so many schedules."""


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Tables this small gain nothing from threads; the traces say more than the log."""
    num_threads = pa.cpu_count()
    pa.set_cpu_count(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    pa.set_cpu_count(num_threads)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def test_every_schedule_ends_right(inputs):
    ended = [run(seed, inputs) for seed in range(NUM_FAST)]
    assert sum(e.num_invocations > 1 for e in ended) > NUM_FAST // 4
    assert {fault for e in ended for _, _, fault in e.faults} >= set(Fault) - {Fault.STALE}
    assert any(e.acknowledged_at_death for e in ended)
    assert sum(e.num_tasks for e in ended) > 3 * NUM_FAST
    assert sum(e.num_continued for e in ended) > NUM_FAST // 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_FAST, NUM_SLOW, NUM_PER_TEST))
def test_every_schedule_of_many_ends_right(inputs, first):
    ended = [run(seed, inputs) for seed in range(first, first + NUM_PER_TEST)]
    met = {met for e in ended for met in e.faults}
    assert {(*write, fault) for write in WRITES for fault in set(Fault) - {Fault.STALE}} <= met
    assert {n for e in ended for n in e.acknowledged_at_death} == {0, 1, 2}


@pytest.mark.slow
def test_a_stale_listing_is_met_too(inputs):
    """It is rare: a process reads few listings."""
    seeds = range(NUM_FAST, NUM_FAST + 2 * NUM_PER_TEST)
    faults = (fault for seed in seeds for _, _, fault in run(seed, inputs).faults)
    assert Fault.STALE in faults


def test_a_seed_is_a_schedule(inputs):
    for seed in (3, 7):
        assert run(seed, inputs).noted == run(seed, inputs).noted


@pytest.mark.parametrize("bug", SABOTAGE)
def test_a_bug_is_found(inputs, bug):
    """A check that nothing can fail proves nothing."""
    kind, settings = SABOTAGE[bug]
    for seed in range(MAX_SEEDS_OF_A_BUG):
        try:
            run(seed, inputs, kind, **settings)
        except Violation:
            return
    raise AssertionError(f"{bug}: not found")
