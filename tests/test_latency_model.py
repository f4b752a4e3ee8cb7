"""The corrected latency model: it predicts devices of many kinds, and follows one that changes."""

import json

import numpy as np
import pytest
from synthetic_devices import (
    LLAMA,
    SPEED,
    TOKENS,
    coarse_timings,
    dear_rows,
    flat_then_knee,
    ideal,
    reads_contexts,
    staircase,
    steep,
    timings,
)

from bastion_batch.core.correction import Correction, Place
from bastion_batch.core.latency import OPTIMISM, WINDOW, LatencyModel
from bastion_batch.core.roofline import PassLoad, Timing


def fitted(*args, **kwargs) -> LatencyModel:
    model = LatencyModel(LLAMA, SPEED)
    model.fit(timings(*args, **kwargs))
    return model


def error(model: LatencyModel, seconds=ideal, tokens=TOKENS) -> float:
    """Largest relative error over passes that were not timed."""
    loads = [(n, rows, c) for n in tokens for rows, c in ((1, 900), (2, 3000)) if n >= rows]
    return max(abs(model.seconds(*load) / seconds(*load) - 1) for load in loads)


# Synthetic devices

DEVICES = [flat_then_knee, steep, staircase, reads_contexts, dear_rows]


def errors_of_steps(model, device, num_steps, seed, num_rows=None, throttled_after=None):
    """Relative errors of predictions made before their steps, as an engine would run them.

    Rows decode from contexts of their own, the budget wanders, and every step is noisy.
    """
    generator = np.random.default_rng(seed)
    rows = num_rows or int(generator.choice([1, 2, 4, 8, 16, 32]))
    context = rows * int(generator.integers(64, 2000))
    nodes, errors = 4.0 * rows, []
    for step in range(num_steps):
        nodes = float(np.clip(nodes * np.exp(0.3 * generator.standard_normal()), 1, 400))
        load = (rows + int(nodes), rows, context)
        seconds = device(*load) * np.exp(0.03 * generator.standard_normal())
        if throttled_after is not None and step >= throttled_after:
            seconds *= 1.5
        errors.append(abs(model.seconds(*load) / seconds - 1))
        model.observe(PassLoad.of(*load), seconds)
        context += 2 * rows
    return errors


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.__name__)
@pytest.mark.parametrize("throttled_after", [None, 20], ids=["steady", "throttled"])
def test_after_fifty_steps_predictions_are_within_ten_percent(device, throttled_after):
    late = []
    for seed in range(12):
        model = LatencyModel(LLAMA, SPEED)
        model.fit(coarse_timings(device))
        late += errors_of_steps(model, device, 80, seed, throttled_after=throttled_after)[50:]
    assert np.median(late) < 0.10
    assert np.quantile(late, 0.9) < 0.15


def slow_when_short(num_tokens, num_rows, context_tokens):
    """No roofline: attention has a slow kernel for contexts under 600 tokens."""
    return (0.03 + 0.0004 * num_tokens) * (2.5 if context_tokens < 600 * num_rows else 1.0)


class TokensOnly(Correction):
    """A correction that knows of pass tokens and of nothing else."""

    def factors(self, num_tokens, num_rows, context_tokens):
        return super().factors(num_tokens, 1, 128)

    def observe(self, place, log_error):
        super().observe(self.blinded(place), log_error)

    def make_monotone(self, place, base_seconds_N):
        super().make_monotone(self.blinded(place), base_seconds_N)

    def blinded(self, place):
        return Place.of(1, 1, 128)._replace(tokens=place.tokens)


def error_over_changing_contexts(model):
    """Median error of late steps, as batches of short and of long rows take turns."""
    generator = np.random.default_rng(0)
    errors = []
    for step in range(100):
        context = 300 if step // 2 % 2 else 1800
        load = (4 + int(generator.integers(0, 60)), 4, 4 * context)
        seconds = slow_when_short(*load) * np.exp(0.03 * generator.standard_normal())
        errors.append(abs(model.seconds(*load) / seconds - 1))
        model.observe(PassLoad.of(*load), seconds)
    return np.median(errors[50:])


def test_contexts_are_corrected_apart():
    model = LatencyModel(LLAMA, SPEED)
    model.fit(coarse_timings(slow_when_short))
    blind = LatencyModel(LLAMA, SPEED, model.roofline, TokensOnly())
    assert error_over_changing_contexts(model) < 0.10
    assert error_over_changing_contexts(blind) > 0.15, "one dimension is not enough"


# Fitting and predicting


def test_a_single_timing_is_enough():
    model = LatencyModel(LLAMA, SPEED)
    model.fit([Timing(1, 1, 128, 0.01)])
    assert model.seconds(1, 1, 128) == pytest.approx(0.01, rel=0.01)


def test_the_correction_takes_up_what_no_roofline_can():
    """fp32 on a CPU: 41, 63, 82, 98, 154 ms at 1, 4, 16, 32, 64 tokens."""
    measured = {1: 0.041, 4: 0.063, 16: 0.082, 32: 0.098, 64: 0.154}
    model = LatencyModel(LLAMA, SPEED)
    model.fit([Timing(n, 1, 128, s) for n, s in measured.items()])
    for num_tokens, seconds in measured.items():
        assert model.seconds(num_tokens, 1, 128) == pytest.approx(seconds, rel=0.02)
    assert 0.041 < model.seconds(2, 1, 128) < 0.063


def test_a_perfect_roofline_needs_no_correction():
    model = fitted()
    assert error(model) < 1e-3
    factors = [row["factors"].values() for row in model.summary()["correction"]]
    np.testing.assert_allclose([*map(list, factors)], 1.0, atol=1e-3)


def test_arrays_and_numbers_agree():
    model = fitted()
    tokens = np.arange(1.0, 600.0)
    priced = model.seconds(tokens, 4, 3000)
    np.testing.assert_allclose(priced, [model.seconds(n, 4, 3000) for n in tokens], rtol=1e-12)
    assert isinstance(model.seconds(3, 1, 0), float)


def test_predictions_are_positive_and_grow_with_the_work():
    model = fitted()
    tokens = model.seconds(np.arange(1.0, 4000.0), 4, 3000)
    assert (tokens > 0).all()
    assert (np.diff(tokens) >= -1e-3 * tokens[:-1]).all()
    contexts = [model.seconds(16, 4, c) for c in range(0, 40_000, 500)]
    assert (np.diff(contexts) >= 0).all()


def test_beyond_the_grid_the_roofline_extrapolates():
    model = fitted()
    assert model.seconds(8192, 1, 100_000) == pytest.approx(ideal(8192, 1, 100_000), rel=0.01)
    assert model.seconds(512, 256, 256 * 500) == pytest.approx(ideal(512, 256, 256 * 500), rel=0.01)


def test_a_pass_with_prompts_is_priced_by_what_it_does():
    """A device on which the head is half of the work of a token."""
    model = fitted()
    last_only = PassLoad.packed([300], [0], num_logits=1)
    everything = PassLoad.packed([300], [0], num_logits=300)
    assert float(model.seconds_of(last_only)) < float(model.seconds_of(everything))
    assert float(model.seconds_of(everything)) == pytest.approx(model.seconds(300, 1, 0))


# Learning


def follow(model: LatencyModel, seconds, num_steps: int, seed: int = 0) -> None:
    """Let the model see random passes of a device."""
    generator = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_tokens = int(np.exp(generator.uniform(0, np.log(500))))
        load = (num_tokens, 1, int(generator.integers(0, 3000)))
        model.observe(PassLoad.of(*load), seconds(*load))


def half_speed(*load) -> float:
    return 2 * ideal(*load)


def test_a_device_that_slows_down_is_followed_within_a_few_dozen_steps():
    model = fitted()
    assert error(model, half_speed) == pytest.approx(0.5, abs=0.01)
    follow(model, half_speed, 60)
    assert error(model, half_speed, TOKENS[:-1]) < 0.1, "even at sizes seen once or twice"


def test_one_size_alone_is_followed_within_a_few_dozen_steps():
    model = fitted()
    for _ in range(40):
        model.observe(PassLoad.of(24, 1, 1000), half_speed(24, 1, 1000))
    assert model.seconds(24, 1, 1000) == pytest.approx(half_speed(24, 1, 1000), rel=0.03)
    sizes = np.arange(1.0, 100.0)
    assert (np.diff(model.seconds(sizes, 1, 1000)) > -1e-3).all(), "no smaller pass takes longer"


def test_the_reported_error_is_of_predictions_made_before_their_outcome():
    model = fitted()
    assert model.median_error is None
    assert model.summary()["median_absolute_relative_error"] is None
    for _ in range(WINDOW):
        model.observe(PassLoad.of(16, 1, 500), ideal(16, 1, 500))
    assert model.median_error < 1e-3
    for _ in range(WINDOW // 2 + 1):
        predicted = model.seconds(16, 1, 500)
        model.observe(PassLoad.of(16, 1, 500), 1.25 * predicted)
    assert model.median_error == pytest.approx(0.2, abs=0.01)
    assert model.summary()["median_absolute_relative_error"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("factor", [100, 0.01])
def test_one_wild_observation_moves_little(factor):
    model = fitted()
    follow(model, ideal, 50)
    for num_tokens in (1, 16, 100):
        before = model.seconds(num_tokens, 1, 500)
        model.observe(PassLoad.of(num_tokens, 1, 500), factor * before)
        assert model.seconds(num_tokens, 1, 500) == pytest.approx(before, rel=0.15)


def test_a_steady_device_stays_as_fitted():
    model = fitted()
    follow(model, ideal, 500)
    assert error(model) < 1e-3


def test_a_scaled_model_predicts_that_much_more():
    model = fitted()
    before = model.seconds(np.arange(1.0, 300.0), 2, 900)
    model.scale(1.7)
    np.testing.assert_allclose(model.seconds(np.arange(1.0, 300.0), 2, 900), 1.7 * before)


# Reports and persistence


def test_a_branch_that_never_bound_is_reported_as_unidentified():
    summary = fitted(tokens=(1, 2, 4, 8)).summary()
    assert summary["unidentified"] == ["compute"]
    assert summary["alpha_compute"] is None
    assert summary["alpha_memory"] == pytest.approx(1.2, rel=0.05)


def test_what_was_learnt_survives_a_round_trip_through_json():
    model = fitted()
    follow(model, half_speed, 30)
    again = LatencyModel.from_dict(LLAMA, json.loads(json.dumps(model.to_dict())))
    sizes = np.arange(1.0, 600.0)
    np.testing.assert_allclose(again.seconds(sizes, 4, 3000), model.seconds(sizes, 4, 3000), 1e-3)
    assert again.median_error is None, "errors are of this run"


@pytest.mark.parametrize("spoil", ["speed", "roofline", "correction"])
def test_a_damaged_model_is_refused(spoil):
    data = fitted().to_dict()
    data[spoil] = {}
    with pytest.raises((KeyError, TypeError, ValueError)):
        LatencyModel.from_dict(LLAMA, data)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), "fast", None])
@pytest.mark.parametrize("part", ["speed", "roofline", "correction"])
def test_a_value_that_cannot_be_is_refused(part, value):
    data = json.loads(json.dumps(fitted().to_dict()))
    if part == "speed":
        data[part]["flops"] = value
    elif part == "roofline":
        data[part]["memory"][0] = value
    else:
        data[part]["log_factors"][0][0][0] = value
    with pytest.raises((TypeError, ValueError)):
        LatencyModel.from_dict(LLAMA, data)


def test_a_correction_on_another_grid_is_refused():
    data = fitted().to_dict()
    data["correction"]["grid"][0] = [1, 2, 3]
    with pytest.raises(ValueError, match="grid"):
        LatencyModel.from_dict(LLAMA, data)


def test_sizes_never_seen_are_hoped_for_and_soon_are_not():
    model = LatencyModel(LLAMA, SPEED)
    load = PassLoad.of(np.array([8.0, 16.0, 17.0]), 2, 300)
    unseen = model.hopeful_seconds_of(load) / model.seconds_of(load)
    np.testing.assert_allclose(unseen, 1 - OPTIMISM)
    for _ in range(99):
        model.observe(PassLoad.of(np.array(14.0), 2, 300), 1e-3)
    hopes = model.hopeful_seconds_of(load) / model.seconds_of(load)
    np.testing.assert_allclose(hopes, [1 - OPTIMISM, 1 - OPTIMISM / 10, 1 - OPTIMISM])
    other_rows = PassLoad.of(np.array([16.0]), 16, 300)
    assert model.hopeful_seconds_of(other_rows) < model.seconds_of(other_rows) * 0.91
