"""The latency model: the formula, the fit, and how it follows a device that changes."""

import numpy as np
import pytest

from bastion_batch.core.roofline import (
    GRID,
    CorrectionTable,
    LatencyModel,
    ModelShape,
    PassLoad,
    Timing,
)

LLAMA = ModelShape(
    num_layers=16,
    hidden_size=2048,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=128256,
    bytes_per_value=2,
)
"""Llama 3.2 1B."""
PEAK, BANDWIDTH = 100e12, 1e12
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def ideal_seconds(
    num_tokens: int, num_rows: int, context_tokens: int, compute=(1.5, 2e-4), memory=(1.2, 1e-3)
) -> float:
    """A device that obeys a roofline with these alphas and betas."""
    load = PassLoad.of(num_tokens, num_rows, context_tokens)
    return max(
        compute[0] * float(LLAMA.flops(load)) / PEAK + compute[1],
        memory[0] * float(LLAMA.moved_bytes(load)) / BANDWIDTH + memory[1],
    )


def timings(tokens=TOKENS, seconds=ideal_seconds) -> list[Timing]:
    return [
        Timing(n, rows, context, seconds(n, rows, context))
        for n in tokens
        for rows, context in ((1, 128), (1, 4000), (4, 8000))
        if n >= rows
    ]


def fitted(*args, **kwargs) -> LatencyModel:
    model = LatencyModel(LLAMA, PEAK, BANDWIDTH)
    model.fit(timings(*args, **kwargs))
    return model


def error(model: LatencyModel, seconds=ideal_seconds, tokens=TOKENS) -> float:
    """Largest relative error over passes that were not timed."""
    loads = [(n, rows, c) for n in tokens for rows, c in ((1, 900), (2, 3000)) if n >= rows]
    return max(abs(model.seconds(*load) / seconds(*load) - 1) for load in loads)


# The formula


def test_flops_are_the_formula_worked_out_by_hand():
    """s = 5 tokens after c = 1,000, one row."""
    s, c = 5, 1000
    per_layer = (
        2 * s * 2048 * 32 * 64  # queries: 41,943,040
        + 4 * s * 2048 * 8 * 64  # keys and values: 20,971,520
        + 4 * s * (c + s) * 32 * 64  # scores and their sums: 41,164,800
        + 2 * s * 32 * 64 * 2048  # output: 41,943,040
        + 6 * s * 2048 * 8192  # feed-forward: 503,316,480
    )
    assert per_layer == 649_338_880
    expected = 16 * per_layer + 2 * s * 2048 * 128256  # head: 2,626,682,880
    assert expected == 13_016_104_960
    assert LLAMA.flops(PassLoad.of(s, 1, c)) == expected


def test_bytes_are_weights_once_the_cache_and_the_logits():
    s, c = 5, 1000
    weights = 16 * (2 * 2048 * 40 * 64 + 3 * 2048 * 8192) + 128256 * 2048
    assert weights == 1_235_746_816, "1.2 billion: tied embedding and head counted once, no norms"
    cache = 2 * 8 * 64 * 16 * (c + s)
    logits = s * 128256
    assert LLAMA.moved_bytes(PassLoad.of(s, 1, c)) == 2 * (weights + cache + logits)


def test_attention_is_summed_over_rows():
    """Three rows of 4 tokens after 100 each: 3 * 4 * (100 + 4) pairs, not 12 * 312."""
    assert PassLoad.of(12, 3, 300).attended_pairs == 3 * 4 * 104


# The fit


@pytest.mark.parametrize(
    ("compute", "memory"),
    [((1.5, 2e-4), (1.2, 1e-3)), ((1.0, 0.0), (1.0, 0.0)), ((3.0, 5e-3), (1.7, 2e-3))],
)
def test_a_fit_recovers_the_device(compute, memory):
    def device(*load):
        return ideal_seconds(*load, compute=compute, memory=memory)

    model = fitted(seconds=device)
    np.testing.assert_allclose(model.compute, compute, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(model.memory, memory, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(model.correction.as_list(), 1.0, atol=1e-3)
    assert error(model, device) < 1e-3


def test_coefficients_are_never_negative():
    generator = np.random.default_rng(0)
    for _ in range(50):

        def noisy(*load):
            return ideal_seconds(*load) * np.exp(0.5 * generator.standard_normal())

        model = fitted(seconds=noisy)
        assert min(*model.compute, *model.memory) >= 0
        assert model.compute != (0, 0)
        assert model.memory != (0, 0)


@pytest.mark.parametrize("tokens", [(1, 2, 4, 8), (256, 512, 1024)], ids=["memory", "compute"])
def test_timings_of_one_branch_fit_that_branch(tokens):
    model = fitted(tokens=tokens)
    assert error(model, tokens=tokens) < 0.02
    bound = "memory" if max(tokens) < 16 else "compute"
    other = {"memory": "compute", "compute": "memory"}[bound]
    assert getattr(model, other) == (1.0, 0.0), "a branch that never bound keeps the prior"
    assert getattr(model, bound) != (1.0, 0.0)


def test_a_branch_that_never_binds_keeps_the_prior_whatever_the_data_sheet_says():
    """Memory ten times slower than that: 512 tokens would look compute-bound."""

    def slow_memory(*load):
        return ideal_seconds(*load, compute=(0.2, 0.0), memory=(10.0, 0.0))

    model = fitted(tokens=TOKENS[:-1], seconds=slow_memory)
    np.testing.assert_allclose(model.memory, (10.0, 0.0), rtol=1e-3, atol=1e-6)
    assert model.compute == (1.0, 0.0)


def test_noise_does_not_invent_a_compute_branch():
    """Timings of a fast device end before its knee; beyond them the data sheet must still count."""
    h100 = (989e12, 3.35e12)

    def device(num_tokens: int) -> float:
        load = PassLoad.of(num_tokens, 1, 128)
        return max(
            float(LLAMA.flops(load)) / h100[0],
            1.2 * float(LLAMA.moved_bytes(load)) / h100[1] + 2e-4,
        )

    generator = np.random.default_rng(0)
    wrong_by = []
    for _ in range(30):
        model = LatencyModel(LLAMA, *h100)
        model.fit(
            [
                Timing(n, 1, 128, device(n) * np.exp(0.02 * generator.standard_normal()))
                for n in (1, 2, 4, 8, 16, 32, 64, 128)
            ]
        )
        wrong_by.append(model.seconds(512, 1, 128) / device(512))
    assert 0.7 < min(wrong_by) <= max(wrong_by) < 1.5


def test_a_single_timing_is_enough():
    model = LatencyModel(LLAMA, PEAK, BANDWIDTH)
    model.fit([Timing(1, 1, 128, 0.01)])
    assert model.seconds(1, 1, 128) == pytest.approx(0.01)


def test_the_correction_takes_up_what_no_roofline_can():
    """fp32 on a CPU: 41, 63, 82, 98, 154 ms at 1, 4, 16, 32, 64 tokens."""
    measured = {1: 0.041, 4: 0.063, 16: 0.082, 32: 0.098, 64: 0.154}
    model = LatencyModel(LLAMA, 0.38e12, 24e9)
    model.fit([Timing(n, 1, 128, s) for n, s in measured.items()])
    for num_tokens, seconds in measured.items():
        assert model.seconds(num_tokens, 1, 128) == pytest.approx(seconds, rel=1e-6)
    assert 0.041 < model.seconds(2, 1, 128) < 0.063


# Predictions


def test_arrays_and_numbers_agree():
    model = fitted()
    tokens = np.arange(1.0, 600.0)
    priced = model.seconds(tokens, 4, 3000)
    assert priced.tolist() == [model.seconds(n, 4, 3000) for n in tokens]
    assert isinstance(model.seconds(3, 1, 0), float)


def test_predictions_are_positive_and_grow_with_the_work():
    model = fitted()
    tokens = model.seconds(np.arange(1.0, 4000.0), 4, 3000)
    assert (tokens > 0).all()
    assert (np.diff(tokens) >= -1e-3 * tokens[:-1]).all()
    contexts = [model.seconds(16, 4, c) for c in range(0, 40_000, 500)]
    assert (np.diff(contexts) >= 0).all()


# Learning


def follow(model: LatencyModel, seconds, num_steps: int, seed: int = 0) -> None:
    """Let the model see random passes of a device."""
    generator = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_tokens = int(np.exp(generator.uniform(0, np.log(500))))
        load = (num_tokens, 1, int(generator.integers(0, 3000)))
        model.observe(*load, seconds(*load))


def half_speed(*load) -> float:
    return 2 * ideal_seconds(*load)


def test_a_device_that_slows_down_is_followed_within_a_few_dozen_steps():
    model = fitted()
    assert error(model, half_speed) == pytest.approx(0.5, abs=0.01)
    follow(model, half_speed, 60)
    assert error(model, half_speed, TOKENS[:-1]) < 0.25, "even at sizes seen once or twice"
    follow(model, half_speed, 120)
    assert error(model, half_speed, TOKENS[:-1]) < 0.1


def test_one_size_alone_is_followed_within_a_few_dozen_steps():
    model = fitted()
    for _ in range(40):
        model.observe(24, 1, 1000, half_speed(24, 1, 1000))
    assert model.seconds(24, 1, 1000) == pytest.approx(half_speed(24, 1, 1000), rel=0.03)


def test_the_residual_says_how_wrong_predictions_are():
    model = fitted()
    follow(model, ideal_seconds, 50)
    assert model.residual < 0.005
    model.observe(16, 1, 500, half_speed(16, 1, 500))
    slowed = model.residual
    assert slowed > 0.005
    follow(model, half_speed, 40)
    assert model.residual > slowed, "while the model lags, the error shows"
    follow(model, half_speed, 400)
    assert model.residual < 0.02
    assert model.summary()["mean_absolute_relative_error"] == pytest.approx(
        model.residual, abs=1e-4
    )


@pytest.mark.parametrize("factor", [100, 0.01])
def test_one_wild_observation_moves_little(factor):
    model = fitted()
    follow(model, ideal_seconds, 50)
    for num_tokens in (1, 16, 100):
        before = model.seconds(num_tokens, 1, 500)
        model.observe(num_tokens, 1, 500, factor * before)
        assert model.seconds(num_tokens, 1, 500) == pytest.approx(before, rel=0.1)


def test_a_steady_device_stays_as_fitted():
    model = fitted()
    follow(model, ideal_seconds, 500)
    assert error(model) < 1e-3


def test_a_table_passes_through_its_points():
    table = CorrectionTable.through([1, 16, 512], [2.0, 0.5, 1.0])
    np.testing.assert_allclose(table.factor(np.array([1.0, 16.0, 512.0, 5000.0])), [2, 0.5, 1, 1])
    assert len(table.as_list()) == len(GRID)
    between = float(table.factor(np.array(4.0)))
    assert between == pytest.approx(1.0), "half way in log tokens, half way in log factor"
