"""What a row will be is learnt from rows that were, short ones not believed too soon."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.lengths import (
    MAX_GROUPS,
    NO_GROUP,
    FactColumns,
    LengthModel,
    LengthTally,
    RowFacts,
    added,
    residual,
)

LIMIT = 16_384
proven = settings(derandomize=True, deadline=None, max_examples=60)


def drawn(num_rows, seed=0, *, spread=0.5, slope=0.4, num_groups=5, limit=LIMIT):
    """Rows of groups with means 5, 5.3, ... and what they came to."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, num_groups, num_rows)
    logs = rng.normal(5, 0.7, num_rows)
    y = 5 + 0.3 * groups + slope * (logs - 5) + rng.normal(0, spread, num_rows)
    rows = [RowFacts(int(g), math.exp(x), limit) for g, x in zip(groups, logs, strict=True)]
    return rows, np.clip(np.exp(y), 1, limit).astype(int).tolist()


def learnt(rows, lengths, live=(), rounds=1):
    model = LengthModel()
    for _ in range(rounds):
        tally = LengthTally()
        for row, length in zip(rows, lengths, strict=True):
            tally.add(row, length, model, cut=length >= row.max_new_tokens)
        model = LengthModel.of(tally.sums(live, model, 0.0))
    return model


def test_groups_slope_and_spread_are_found():
    model = learnt(*drawn(4000))
    assert model.slope == pytest.approx(0.4, abs=0.03)
    assert model.spread == pytest.approx(0.5, abs=0.03)
    for group in range(5):
        assert model.log_mean(RowFacts(group, math.exp(5), LIMIT)) == pytest.approx(
            5 + 0.3 * group, abs=0.06
        )
    assert model.log_mean(RowFacts(99, math.exp(5), LIMIT)) == pytest.approx(5.6, abs=0.3)
    assert model.unknown_spread > model.spread


def test_columns_and_single_rows_agree():
    rows, lengths = drawn(300)
    model = learnt(rows, lengths)
    rows.append(RowFacts(77, 0.0, 10))
    np.testing.assert_allclose(
        model.log_means(FactColumns.of(rows)), [model.log_mean(row) for row in rows]
    )
    assert len(model.log_means(FactColumns.of([]))) == 0


def test_a_group_of_one_row_leans_on_the_others():
    rows, lengths = drawn(500)
    model = learnt([*rows, RowFacts(9, math.exp(5), LIMIT)], [*lengths, 16_000])
    assert model.log_mean(RowFacts(9, math.exp(5), LIMIT)) < math.log(8_000)


def test_rows_cut_at_their_limit_count_for_more_than_the_limit():
    rows, lengths = drawn(3000, num_groups=1, spread=0.8)
    cut_rows = [row._replace(max_new_tokens=180) for row in rows]
    cut = [min(length, 180) for length in lengths]
    whole, blind = learnt(rows, lengths), learnt(rows, cut)
    assert blind.any_mean < whole.any_mean - 0.2
    aware = learnt(cut_rows, cut, rounds=12)
    assert aware.any_mean == pytest.approx(whole.any_mean, abs=0.12)
    assert aware.spread == pytest.approx(whole.spread, abs=0.12)


def test_rows_that_still_run_keep_the_short_ones_from_passing_for_all():
    rows, lengths = drawn(3000, num_groups=1, spread=0.8)
    ended = [(r, n) for r, n in zip(rows, lengths, strict=True) if n <= 150]
    live = [(r, 150) for r, n in zip(rows, lengths, strict=True) if n > 150]
    hasty = learnt(*zip(*ended, strict=True))
    patient = learnt(*zip(*ended, strict=True), live=live, rounds=12)
    truth = learnt(rows, lengths)
    assert hasty.any_mean < truth.any_mean - 0.4
    assert patient.any_mean == pytest.approx(truth.any_mean, abs=0.1)


def test_sums_of_two_workers_are_the_sums_of_all():
    rows, lengths = drawn(400)
    halves = []
    for part in (slice(None, 150), slice(150, None)):
        tally = LengthTally()
        for row, length in zip(rows[part], lengths[part], strict=True):
            tally.add(row, length, LengthModel())
        halves.append(tally.sums([], LengthModel(), 0.0))
    together, apart = LengthModel.of(added(halves)), learnt(rows, lengths)
    np.testing.assert_allclose(together.means, apart.means)
    assert together.spread == pytest.approx(apart.spread)


def test_what_travels_is_small():
    model = learnt(*drawn(2000, num_groups=20))
    assert len(pickle.dumps(model)) < 1500
    assert pickle.loads(pickle.dumps(model)) == model


def test_groups_are_bounded():
    tally = LengthTally()
    for group in range(3 * MAX_GROUPS):
        tally.add(RowFacts(group, 10.0, LIMIT), 100, LengthModel())
    sums = tally.sums([], LengthModel(), 0.0)
    assert len(sums) <= MAX_GROUPS + 1
    assert sum(group.count for group in sums.values()) == 3 * MAX_GROUPS
    other = {1000 + group: values for group, values in sums.items() if group != NO_GROUP}
    both = added([sums, other])
    assert len(both) <= MAX_GROUPS
    assert sum(g.count for g in both.values()) == pytest.approx(
        sum(g.count for s in (sums, other) for g in s.values())
    )


def test_residuals_are_those_of_the_distribution():
    rng = np.random.default_rng(3)
    lengths = np.minimum(np.exp(rng.normal(6, 1.2, 400_000)), 3000)
    for so_far in (0, 50, 400, 2000):
        alive = lengths[lengths > so_far]
        assert residual(6, 1.2, so_far, 3000) == pytest.approx((alive - so_far).mean(), rel=0.02)


@proven
@given(st.floats(-3, 12), st.floats(0.05, 3), st.integers(0, 20_000), st.integers(1, 20_000))
def test_a_residual_is_positive_and_ends_at_the_limit(mean, spread, so_far, limit):
    left = residual(mean, spread, so_far, limit)
    assert math.isfinite(left)
    if so_far >= limit:
        assert left == 0
    else:
        assert 0 < left <= max(limit - so_far, 1.0) + 1e-6


@proven
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.floats(0, 1e5), st.integers(1, 20_000), st.booleans()),
        max_size=60,
    )
)
def test_any_rows_make_a_model(rows):
    tally = LengthTally()
    for group, size, length, cut in rows:
        tally.add(RowFacts(group, size, 20_000), length, LengthModel(), cut=cut)
    model = LengthModel.of(tally.sums([], LengthModel(), 0.0))
    assert 0 < model.spread <= model.unknown_spread
    assert all(map(math.isfinite, (model.mean, model.slope, *model.means)))
