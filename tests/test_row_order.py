"""Rows start longest first over all open units; none is lost, and none is said twice."""

import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.lengths import FactColumns, LengthModel, RowFacts
from bastion_batch.core.row_order import RowOrder, Waiting

proven = settings(derandomize=True, deadline=None, max_examples=80)
MODEL = LengthModel(mean=5.0, slope=1.0, center=5.0, spread=0.1)
"""Rows are as long as their prompts, about."""


def facts(*sizes, limit=10_000):
    return [RowFacts(0, size, limit) for size in sizes]


def add(order, unit, *sizes):
    keys = [(f"u{unit}-{i}", 0) for i in range(len(sizes))]
    order.add(unit, keys, FactColumns.of(facts(*sizes)))
    return keys


def everything(order, is_waiting=lambda unit, key: True):
    return list(iter(lambda: order.next(is_waiting), None))


def of(*sizes_by_unit):
    order = RowOrder()
    order.learn(MODEL)
    for unit, sizes in enumerate(sizes_by_unit):
        add(order, unit, *sizes)
    return order


def test_the_longest_of_all_units_starts_first():
    order = of([10, 300, 20], [200, 5, 400])
    taken = [(row.unit, row.key[0][-1]) for row in everything(order)]
    assert taken == [(1, "2"), (0, "1"), (1, "0"), (0, "2"), (0, "0"), (1, "1")]


def test_rows_predicted_equal_start_in_input_order():
    order = of([20, 300, 20, 300, 20])
    assert [row.key[0][-1] for row in everything(order)] == ["1", "3", "0", "2", "4"]
    order = of([50] * 6)
    taken = [order.next(lambda unit, key: True)]
    order.learn(MODEL._replace(mean=4.0))
    assert [row.key[0][-1] for row in (*taken, *everything(order))] == list("012345")


def test_what_is_learnt_changes_the_order_of_what_waits():
    order = of([10, 300, 20], [200, 5, 400])
    assert order.next(lambda unit, key: True) == Waiting(1, ("u1-2", 0))
    order.learn(MODEL._replace(slope=-1.0))
    assert order.next(lambda unit, key: True) == Waiting(1, ("u1-1", 0))


def test_the_oldest_unit_is_finished_when_others_wait_to_be_opened():
    order = of([10, 300, 20], [200, 5, 400])
    order.finish_oldest(True)
    assert [row.unit for row in everything(order)] == [0, 0, 0, 1, 1, 1]


def test_a_row_that_came_back_goes_on_first():
    order = of([10, 300])
    order.put_back(7, ("mine", 0), facts(50)[0], num_tokens=20)
    order.put_back(7, ("longer", 0), facts(500)[0], num_tokens=20)
    assert [row.key[0] for row in everything(order)] == ["longer", "mine", "u0-1", "u0-0"]


def test_rows_that_wait_no_longer_are_skipped_and_units_dropped():
    order = of([10, 300, 20], [200])
    order.drop_unit(1)
    assert [row.key[0] for row in everything(order, lambda u, key: key[0] != "u0-1")] == [
        "u0-2",
        "u0-0",
    ]
    assert order.backlog().num_rows == 0


def test_others_get_the_rows_that_would_start_next():
    order = of([10, 300, 20], [200, 5, 400])
    given_away = order.take_for_other(2, lambda unit, key: True)
    assert [row.key[0] for row in given_away] == ["u1-2", "u0-1"]
    assert len(order.take_for_other(99, lambda unit, key: True)) == 4


def test_the_backlog_counts_expected_tokens_and_limits():
    order = RowOrder()
    order.learn(MODEL)
    order.add(0, [("a", 0), ("b", 0)], FactColumns.of(facts(100, 5000, limit=1000)))
    num_rows, num_tokens = order.backlog()
    assert num_rows == 2
    assert abs(num_tokens - (100 * math.exp(0.005) + 1000)) < 1


def test_the_other_samples_of_a_long_row_come_sooner():
    order = RowOrder()
    order.learn(MODEL)
    keys = [(f"r{i}", sample) for i in range(100) for sample in (0, 1)]
    order.add(0, keys, FactColumns.of(facts(*[100.0] * 200)))
    for i in range(100):
        order.ended(0, (f"r{i}", 0), facts(100)[0], 1000 if i == 42 else 100)
    order.learn(MODEL)
    assert order.next(lambda unit, key: key[1] == 1) == Waiting(0, ("r42", 1))


@proven
@given(
    st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=8), min_size=1, max_size=5),
    st.lists(st.sampled_from(["next", "share", "learn", "back", "oldest"]), max_size=25),
)
def test_every_row_is_named_once_whatever_happens(sizes, actions):
    orders = [of(*sizes), of(*sizes)]
    taken: list[Waiting] = []
    num_backs = 0
    for number, action in enumerate(actions):
        for order in orders:
            match action:
                case "learn":
                    order.learn(MODEL._replace(slope=(-1.0) ** number))
                case "oldest":
                    order.finish_oldest(number % 2 == 0)
                case "back" if taken:
                    order.put_back(taken[-1].unit, taken[-1].key, facts(9)[0], 3)
        if action == "back" and taken:
            taken.pop()
            num_backs += 1
        if action in ("next", "share"):
            count = 1 if action == "next" else 3
            both = [order.take_for_other(count, lambda unit, key: True) for order in orders]
            assert both[0] == both[1], "the same calls give the same answers"
            taken += both[0]
    taken += everything(orders[0])
    assert Counter((row.unit, row.key) for row in taken) == Counter(
        (unit, (f"u{unit}-{i}", 0)) for unit, rows in enumerate(sizes) for i in range(len(rows))
    )


def test_rows_cost_a_few_bytes_each():
    order = RowOrder()
    num_rows = 50_000
    columns = FactColumns(
        np.zeros(num_rows, np.int64), np.full(num_rows, 9.0), np.full(num_rows, 64)
    )
    order.add(0, [("r", i) for i in range(num_rows)], columns)
    queue = order._queues[0]
    assert queue._left.nbytes + queue._expected.nbytes == 8 * num_rows
