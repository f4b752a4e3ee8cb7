"""Costs of the parts of a step."""

import pytest
from tiny import tiny_target

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import PassLoad
from bastion_batch.engine.costs import DraftLoad, StepCosts


def costs() -> StepCosts:
    shape = tiny_target("llama").shape
    return StepCosts(LatencyModel(shape, DeviceSpeed(1e9, 1e8)), None)


def test_plain_steps_are_known_apart_from_drafted_ones():
    learnt = costs()
    plain, drafted = 0.04, 0.09
    for _ in range(100):
        learnt.observe_plain_step(16, 1600, plain)
    for _ in range(300):
        learnt.observe_verify(PassLoad.of(44, 16, 1600), drafted)
        learnt.observe_other(0.01)
    assert learnt.plain_step_seconds(16, 1600) == pytest.approx(plain, rel=1e-6)
    assert learnt.verify.seconds(44, 16, 1600) == pytest.approx(drafted, rel=0.01)


def test_plain_steps_of_a_size_never_seen_are_the_models():
    learnt = costs()
    expected = learnt.verify.seconds(4, 4, 400) + learnt.other_seconds
    assert learnt.plain_step_seconds(4, 400) == expected
    learnt.observe_plain_step(16, 1600, 0.04)
    assert learnt.plain_step_seconds(4, 400) == expected


def test_a_slower_device_is_followed():
    learnt = costs()
    for seconds in [0.04] * 50 + [0.06] * 20:
        learnt.observe_plain_step(8, 800, seconds)
    assert learnt.plain_step_seconds(8, 800) == pytest.approx(0.06, rel=0.01)


def test_drafting_costs_nothing_where_nothing_is_priced():
    assert costs().draft_seconds(DraftLoad(7, 1, 100)) == 0
