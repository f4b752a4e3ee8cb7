"""The roofline: the formula, worked out by hand, and the fit."""

import numpy as np
import pytest
from synthetic_devices import LLAMA, SPEED, TOKENS, ideal, timings

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.fitting import fit_roofline, undisturbed
from bastion_batch.core.roofline import Branch, PassLoad, Roofline, Timing

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


def test_a_packed_pass_counts_every_row_for_itself():
    """A prompt of 500 after nothing, and two trees of 4 after 1,000: 17 tokens get logits."""
    load = PassLoad.packed([500, 4, 4], [0, 1000, 1000], num_logits=9)
    assert (load.num_tokens, load.num_rows, load.context_tokens) == (508, 3, 2000)
    assert load.attended_pairs == 500 * 500 + 2 * 4 * 1004
    assert load.num_logits == 9


def test_a_packed_pass_of_equal_rows_is_an_even_one():
    packed, even = PassLoad.packed([5] * 3, [40] * 3, num_logits=15), PassLoad.of(15, 3, 120)
    assert [float(value) for value in packed] == [float(value) for value in even]


def test_the_head_is_priced_where_it_runs():
    prices = Roofline().prices(LLAMA, DeviceSpeed(1e12, 1e15))  # compute decides
    whole = PassLoad.packed([400], [0], num_logits=400)
    last = PassLoad.packed([400], [0], num_logits=1)
    saved = float(prices.of(whole) - prices.of(last))
    assert saved == pytest.approx(399 * 2 * 2048 * 128256 / 1e12, rel=1e-6)


# The fit


def fit(tokens=TOKENS, seconds=ideal, speed=SPEED):
    return fit_roofline(LLAMA, speed, timings(tokens, seconds))


def error(roofline, seconds=ideal, tokens=TOKENS):
    """Largest relative error over passes that were not timed."""
    prices = roofline.prices(LLAMA, SPEED)
    loads = [(n, rows, c) for n in tokens for rows, c in ((1, 900), (2, 3000)) if n >= rows]
    return max(abs(float(prices.of(PassLoad.of(*load))) / seconds(*load) - 1) for load in loads)


@pytest.mark.parametrize(
    ("compute", "memory", "attention"),
    [
        ((1.5, 2e-4), (1.2, 1e-3), (2.0, 3.0)),
        ((1.0, 0.0), (1.0, 0.0), (1.0, 1.0)),
        ((3.0, 5e-3), (1.7, 2e-3), (9.0, 0.5)),
    ],
)
def test_a_fit_recovers_the_device(compute, memory, attention):
    def device(*load):
        return ideal(*load, compute=compute, memory=memory, attention=attention)

    found = fit(seconds=device)
    assert found.unidentified == ()
    assert error(found, device) < 1e-3
    np.testing.assert_allclose(found.compute, compute, rtol=0.02, atol=1e-5)
    np.testing.assert_allclose(found.attention_memory, attention[1], rtol=0.02)


def test_coefficients_are_never_negative():
    generator = np.random.default_rng(0)
    for _ in range(30):

        def noisy(*load):
            return ideal(*load) * np.exp(0.5 * generator.standard_normal())

        found = fit(seconds=noisy)
        coefficients = (*found.compute, *found.memory, found.attention_compute)
        assert min(*coefficients, found.attention_memory) >= 0
        assert found.compute != (0, 0)
        assert found.memory != (0, 0)


@pytest.mark.parametrize("tokens", [(1, 2, 4, 8), (256, 512, 1024)], ids=["memory", "compute"])
def test_timings_of_one_branch_fit_that_branch_and_say_so(tokens):
    found = fit(tokens)
    assert error(found, tokens=tokens) < 0.02
    other = "compute" if max(tokens) < 16 else "memory"
    assert found.unidentified == (other,)
    assert getattr(found, other) == Branch(), "a branch that never bound keeps the prior"


def test_a_branch_that_never_binds_keeps_the_prior_whatever_the_data_sheet_says():
    """Memory ten times slower than that: 512 tokens would look compute-bound."""

    def slow_memory(*load):
        return ideal(*load, compute=(0.2, 0.0), memory=(10.0, 0.0))

    found = fit(TOKENS[:-1], slow_memory)
    np.testing.assert_allclose(found.memory, (10.0, 0.0), rtol=0.02, atol=1e-4)
    assert found.compute == Branch()
    assert found.unidentified == ("compute",)


def test_attention_is_unidentified_when_every_context_is_the_same():
    same = [Timing(n, 1, 128, ideal(n, 1, 128)) for n in TOKENS]
    assert "attention" in fit_roofline(LLAMA, SPEED, same).unidentified


def test_noise_does_not_invent_a_compute_branch():
    """Timings of a fast device end before its knee; beyond them the data sheet must still count."""
    h100 = DeviceSpeed(989e12, 3.35e12)

    def device(num_tokens: int) -> float:
        load = PassLoad.of(num_tokens, 1, 128)
        return max(
            float(LLAMA.flops(load)) / h100.flops,
            1.2 * float(LLAMA.moved_bytes(load)) / h100.bandwidth + 2e-4,
        )

    generator = np.random.default_rng(0)
    wrong_by = []
    for _ in range(30):
        found = fit_roofline(
            LLAMA,
            h100,
            [
                Timing(n, 1, 128, device(n) * np.exp(0.02 * generator.standard_normal()))
                for n in (1, 2, 4, 8, 16, 32, 64, 128)
            ],
        )
        predicted = float(found.prices(LLAMA, h100).of(PassLoad.of(512, 1, 128)))
        wrong_by.append(predicted / device(512))
    assert 0.7 < min(wrong_by) <= max(wrong_by) < 1.5


def test_too_few_timings_leave_the_data_sheet():
    assert fit_roofline(LLAMA, SPEED, [Timing(1, 1, 128, 0.01)]) == Roofline()


def test_a_pass_that_was_held_up_is_known_by_a_larger_one_that_was_not():
    taken = [Timing(1, 1, 128, 0.05), Timing(4, 1, 128, 0.09), Timing(16, 1, 128, 0.06)]
    elsewhere = [Timing(4, 1, 1024, 0.20), Timing(16, 4, 512, 0.01)]
    found = undisturbed(taken + elsewhere)
    assert [timing.seconds for timing in found] == [0.05, 0.06, 0.06, 0.20, 0.01]


def test_rows_of_a_pass_are_padded_to_the_longest_unless_apart_is_cheaper():
    even = PassLoad.padded(np.array([12.0]), np.array([4.0]), [100] * 3, call_pairs=0)
    assert even.attended_pairs == PassLoad.of(12, 3, 300).attended_pairs
    uneven = PassLoad.padded(np.array([12.0]), np.array([10.0]), [100] * 3, call_pairs=10_000)
    assert uneven.attended_pairs == 3 * 10 * 110
    apart = PassLoad.padded(np.array([12.0]), np.array([10.0]), [100] * 3, call_pairs=10)
    assert apart.attended_pairs == 12 * 104 + 3 * 10
