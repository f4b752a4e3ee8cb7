"""The correction table: through given points, and what one observation says about other passes."""

import numpy as np
import pytest

from bastion_batch.core.correction import MAX_LOG_ERROR, RATE, SHARED, Correction, Place

HERE = (24, 4, 4 * 700)
"""(tokens, rows, context tokens), between the points of every axis."""


def log_factor(correction, num_tokens, num_rows, context_tokens):
    factors = correction.factors(np.array([float(num_tokens)]), num_rows, context_tokens)
    return float(np.log(factors[0]))


def after(log_error, *places):
    """A correction that has seen one error at every place."""
    correction = Correction()
    for place in places:
        correction.observe(Place.of(*place), log_error)
    return correction


def test_it_passes_through_what_was_measured():
    passes = [(1, 1, 128), (16, 1, 128), (64, 8, 1024), (5, 3, 900), (700, 16, 30_000)]
    wanted = [0.7, -0.3, 0.2, 0.0, 0.5]
    correction = Correction.through([Place.of(*one) for one in passes], wanted)
    found = [log_factor(correction, *one) for one in passes]
    np.testing.assert_allclose(found, wanted, atol=0.01)


def test_twins_are_averaged():
    correction = Correction.through([Place.of(*HERE)] * 2, [0.2, 0.6])
    assert log_factor(correction, *HERE) == pytest.approx(0.4, abs=0.01)


def test_a_single_point_says_less_the_farther_away():
    correction = Correction.through([Place.of(*HERE)], [1.0])
    for axis in ([24, 48, 400, 2000], [4, 8, 64], [700, 3000, 16_000]):
        number = {24: 0, 4: 1, 700: 2}[axis[0]]
        found = []
        for value in axis:
            tokens, rows, context = (
                value if number == n else v for n, v in enumerate((24, 4, 700))
            )
            found.append(log_factor(correction, tokens, rows, rows * context))
        assert found == sorted(found, reverse=True)
        assert found[0] == pytest.approx(1.0, abs=0.01)
        assert found[-1] < 0.8
        assert found[-1] > SHARED - 0.01


def test_an_observation_takes_over_its_share_exactly_where_it_was_made():
    for place in (HERE, (1, 1, 10), (3000, 100, 10**7), (16, 1, 256)):
        assert log_factor(after(0.1, place), *place) == pytest.approx(RATE * 0.1)


def test_an_observation_says_something_about_every_pass():
    correction = after(0.2, HERE)
    far = log_factor(correction, 2048, 64, 64 * 16_000)
    assert SHARED * RATE * 0.2 <= far < RATE * 0.2 / 2


def test_a_wild_observation_counts_as_a_bounded_one():
    assert log_factor(after(50.0, HERE), *HERE) == pytest.approx(RATE * MAX_LOG_ERROR)
    assert log_factor(after(-50.0, HERE), *HERE) == pytest.approx(-RATE * MAX_LOG_ERROR)


def test_what_contradicts_an_observation_gives_way():
    """Sizes around 24 were guessed: 8 to be dear, 64 to be cheap. A flat device says otherwise."""
    correction = Correction.through([Place.of(8, 4, 2800), Place.of(64, 4, 2800)], [1.5, -1.5])
    flat = np.full(20, 0.01)
    correction.make_monotone(Place.of(*HERE), flat)
    sizes = np.arange(1.0, 2049.0)
    factors, at = correction.factors(sizes, 4, 2800), np.exp(log_factor(correction, *HERE))
    assert (factors[sizes <= 16] <= at * 1.001).all()
    assert (factors[sizes >= 32] >= at * 0.999).all()


def test_nothing_gives_way_where_nothing_contradicts():
    correction = after(0.3, HERE, (4, 1, 100))
    before = correction.to_dict()
    correction.make_monotone(Place.of(*HERE), np.geomspace(0.001, 1000, 20))
    assert correction.to_dict() == before
