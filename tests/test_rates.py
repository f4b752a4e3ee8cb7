"""A worker's curve is found from what it did, followed when it changes, and never from thin air."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.rates import ASSUMED_HALF_SHARE, RateCurve, RateFit, RateSample

TRUE = RateCurve(saturated=4000.0, half=40.0, prefill=30_000.0)
MAX_BATCH = 192
proven = settings(derandomize=True, deadline=None, max_examples=60)


def sample(curve, batch, *, seconds=1.0, prefill_tokens=0.0):
    """What a worker of this curve does in so many seconds."""
    decoding = seconds - prefill_tokens / curve.prefill
    return RateSample(batch, seconds, curve.total(batch) * decoding, prefill_tokens)


def fitted(samples, prior=None):
    fit = RateFit(MAX_BATCH)
    for one in samples:
        fit.add(one, prior)
    assert fit.fit is not None
    return fit.fit


def test_a_curve_is_what_it_says():
    assert TRUE.total(0) == 0.0
    assert TRUE.total(40) == pytest.approx(2000.0)
    assert TRUE.per_row(40) * 40 == pytest.approx(TRUE.total(40))


def test_nothing_measured_is_nothing_known():
    fit = RateFit(MAX_BATCH)
    assert fit.fit is None
    fit.add(RateSample(0.0, 1.0, 0.0))
    fit.add(RateSample(8.0, 1.0, 0.0))
    fit.add(RateSample(8.0, 0.0, 10.0))
    assert fit.fit is None


def test_batches_of_different_size_show_the_curve():
    noise = np.random.default_rng(0)
    samples = [sample(TRUE, b) for b in noise.uniform(1, MAX_BATCH, 60)]
    samples = [s._replace(seconds=s.seconds * np.exp(noise.normal(0, 0.03))) for s in samples]
    curve, half_from = fitted(samples)
    assert half_from == "measured"
    for batch in (4, 40, MAX_BATCH):
        assert curve.total(batch) == pytest.approx(TRUE.total(batch), rel=0.06)


def test_one_batch_size_leaves_the_shape_to_a_prior_or_an_assumption():
    full = [sample(TRUE, MAX_BATCH)] * 20
    curve, half_from = fitted(full)
    assert half_from == "assumed"
    assert curve.half == pytest.approx(ASSUMED_HALF_SHARE * MAX_BATCH, rel=0.01)
    assert curve.total(MAX_BATCH) == pytest.approx(TRUE.total(MAX_BATCH), rel=0.01)
    curve, half_from = fitted(full, RateCurve(8000.0, 40.0, 60_000.0))
    assert half_from == "prior"
    assert curve.half == pytest.approx(40.0, rel=0.01)
    assert curve.total(MAX_BATCH) == pytest.approx(TRUE.total(MAX_BATCH), rel=0.01)


def test_prompts_are_not_mistaken_for_slow_decoding():
    """A draining batch takes in prefixes, which costs time just when it is small."""
    noise = np.random.default_rng(1)
    samples = [
        sample(TRUE, b, prefill_tokens=noise.uniform(0, 12_000) if b < 100 else 500)
        for b in np.linspace(MAX_BATCH, 2, 80)
    ]
    curve, _ = fitted(samples)
    for batch in (4, 40, MAX_BATCH):
        assert curve.total(batch) == pytest.approx(TRUE.total(batch), rel=0.05)
    assert curve.prefill == pytest.approx(TRUE.prefill, rel=0.1)


def test_a_worker_that_slows_down_is_followed():
    fit = RateFit(MAX_BATCH)
    batches = np.random.default_rng(2).uniform(20, MAX_BATCH, 400)
    for b in batches[:200]:
        fit.add(sample(TRUE, b))
    slow = RateCurve(TRUE.saturated / 3, TRUE.half, TRUE.prefill / 3)
    for b in batches[200:320]:
        fit.add(sample(slow, b))
    assert fit.fit is not None
    assert fit.fit.curve.total(96) == pytest.approx(slow.total(96), rel=0.15)


def test_one_step_that_hangs_counts_for_little():
    samples = [sample(TRUE, MAX_BATCH)] * 60
    calm = fitted(samples).curve.total(MAX_BATCH)
    jolted = fitted([*samples, samples[0]._replace(seconds=60.0, tokens=samples[0].tokens)])
    assert jolted.curve.total(MAX_BATCH) > 0.75 * calm


@proven
@given(
    st.lists(
        st.tuples(st.floats(1, 192), st.floats(0.01, 5), st.floats(1, 1e5), st.floats(0, 1e5)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_is_reported_the_curve_is_one(rows):
    """Finite, positive, increasing in the batch, and the same for the same samples."""
    fits = [RateFit(MAX_BATCH), RateFit(MAX_BATCH)]
    for row in rows:
        for fit in fits:
            fit.add(RateSample(*row))
    assert fits[0].fit == fits[1].fit
    if fits[0].fit is not None:
        curve = fits[0].fit.curve
        assert all(np.isfinite(value) and value > 0 for value in curve)
        assert 0 < curve.total(1) < curve.total(50) < curve.total(MAX_BATCH) < curve.saturated
        assert curve.half <= 3 * ASSUMED_HALF_SHARE * MAX_BATCH + 1e-9
