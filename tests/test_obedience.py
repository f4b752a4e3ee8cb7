"""The cluster decides nothing: whatever a balance says is done, be it absurd, and rows stay right.

Who decodes what is decided in `bastion_batch.core` alone, by what a simulator drives too.
"""

import ast
import math
from pathlib import Path
from random import Random

import pytest
from balances import PlainBalance
from local_cluster import LocalCluster, make_job, prompts, row_id

from bastion_batch.cluster import coordinator, exchange, feeder, tally, waiting
from bastion_batch.cluster.mail import Task
from bastion_batch.core.balance import Balance
from bastion_batch.core.lengths import LengthModel
from bastion_batch.core.orders import RowMove, Share

LONG = {"max_new_tokens": 120}


def cluster(directory, count=20, **options):
    return LocalCluster(make_job(directory, prompts(count), decoding=LONG), **options)


# What the source may not contain

CHOOSING = {"sorted", "heapq", "random", "nlargest", "nsmallest", "choice", "shuffle", "sort"}


def choices_in(module):
    """Where a module orders things, or picks the best of them."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in CHOOSING:
                yield name, node.lineno
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"min", "max"}
            and any(keyword.arg == "key" for keyword in node.keywords)
        ):
            yield node.func.id, node.lineno


@pytest.mark.parametrize("module", [tally, waiting, feeder])
def test_nothing_is_ordered_or_picked(module):
    assert list(choices_in(module)) == []


def test_the_coordinator_and_the_exchange_order_only_what_is_shown_or_sent():
    """Attempts are listed in order, and mail goes out in order: neither chooses anything."""
    assert [name for name, _ in choices_in(coordinator)] == ["sorted"]
    assert [name for name, _ in choices_in(exchange)] == ["sorted"]


def test_units_come_from_the_balance_alone():
    """No other expression of the coordinator makes a unit's number for a lease."""
    source = Path(coordinator.__file__).read_text()
    assert source.count("self._balance.lease(") == 1
    lease = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "lease"
    )
    made = [ast.unparse(n.value) for n in ast.walk(lease) if isinstance(n, ast.Assign)
            and ast.unparse(n.targets[0]) == "unit"]  # fmt: skip
    assert made == ["None if state.leaving else self._balance.lease(attempt, now)"]


def test_a_balance_has_no_other_methods_than_those_that_are_obeyed():
    """What `core` decides is asked for: a new decision must be wired in, and tested here."""
    public = {name for name in vars(Balance) if not name.startswith("_")}
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(coordinator.__file__).read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._balance"
    }
    assert used == public


# What a balance says, to the letter


class Backwards(PlainBalance):
    """The last unit first."""

    def lease(self, worker, now):
        left = [
            u for u in range(len(self.num_outputs)) if u not in self.finished | set(self.owners)
        ]
        if not left or sum(owner == worker for owner in self.owners.values()) >= 2:
            return None
        self.owners[left[-1]] = worker
        return left[-1]

    def give_back(self, units):
        for unit in units:
            del self.owners[unit]


def test_units_are_opened_as_leased(tmp_path):
    c = cluster(tmp_path, balance=Backwards)
    first = c.start("w0")
    opened = []
    while c.workers:
        c.turn(first)
        if first in c.workers:
            opened += [u for u in c.workers[first]._exchange.open if u not in opened]
    assert opened == [3, 2, 1, 0]
    c.check()


def test_no_more_rows_run_than_ordered(tmp_path):
    c = cluster(tmp_path)
    first = c.start("w0")
    c.balance.say(first, max_running=1)
    c.turn(first)
    most = 0
    for _ in range(40):
        c.turn(first)
        most = max(most, len(c.workers[first]._live))
    c.balance.say(first, max_running=0)
    c.until(lambda: c.workers[first]._exchange.waiting.orders.max_running == 0)
    c.until(lambda: not c.workers[first]._engine.has_work)
    c.turns(50)
    assert not c.workers[first]._engine.has_work, "nothing may start, so nothing does"
    c.balance.say(first, max_running=None)
    c.run()
    assert most <= c.max_batch + 2
    c.check()


def test_no_unit_is_asked_for_when_none_may_be_opened(tmp_path):
    c = cluster(tmp_path)
    first = c.start("w0")
    c.balance.say(first, may_open=False)
    c.turns(3)
    num_open = len(c.workers[first]._exchange.open)
    c.turns(6)
    assert len(c.workers[first]._exchange.open) <= num_open <= 2
    c.balance.say(first, may_open=True)
    c.run()
    c.check()


def test_samples_that_end_tell_how_long_the_others_of_their_row_will_be(tmp_path):
    samples = LONG | {"samples_per_row": 40}
    rows = make_job(tmp_path, prompts(2), decoding=samples, output={"unit_rows": 80})
    c = LocalCluster(rows, max_batch=2)
    first = c.start("w0")
    worker = c.workers[first]
    model = LengthModel(mean=math.log(LONG["max_new_tokens"]), spread=0.01)
    c.balance.say(first, model=model, max_running=0)
    c.until(lambda: worker._exchange.waiting.model is model and not worker._live)
    c.balance.say(first, max_running=None)
    c.until(lambda: worker._reporter.num_finished >= 4)
    c.balance.say(first, model=model)  # shorter than the model says, so the other row is first
    c.until(lambda: c.balance.orders[first].model is None, limit=100)
    c.turns(2)
    begun = worker._reporter.num_finished + len(worker._live)
    c.until(lambda: worker._reporter.num_finished + len(worker._live) > begun)
    assert list(worker._live.rows())[-1].row.key[0] == row_id(1)
    c.run()
    c.check()


def test_shares_go_to_whom_the_balance_names(tmp_path):
    c = cluster(tmp_path)
    first, second, third = (c.start(f"w{i}") for i in range(3))
    c.until(lambda: c.workers[first]._exchange.waiting.backlog().num_rows >= 3, first)
    c.balance.say(first, shares=[Share(third, 2), Share(first, 1)])
    c.until(lambda: len([to for to, mail in c.post.sent if isinstance(mail, Task)]) >= 2, first)
    assert [to for to, mail in c.post.sent if isinstance(mail, Task)] == [third, third]
    assert second not in {to for to, _ in c.post.sent}
    c.run()
    c.check()


class Frantic(PlainBalance):
    """Every row to another worker, at every report; and now and then nobody may do anything."""

    def __init__(self, **units):
        super().__init__(**units)
        self.random = Random(5)
        self.num_ordered = 0

    def report(self, worker, status, now):
        orders = super().report(worker, status, now)
        if self.num_ordered > 300 or worker not in self.batches:
            return orders
        targets = [*self.batches, 999_999]
        moves = [
            RowMove(row.unit, row.key, self.random.choice(targets))
            for other in self.statuses.values()
            for row in other.running
            if self.owners.get(row.unit) == worker
        ]
        self.num_ordered += 1
        shares = [Share(self.random.choice(targets[:-1]), self.random.randrange(3))]
        return orders._replace(
            moves=tuple(m for m in moves if m.to in self.batches),
            shares=tuple(shares),
            max_running=self.random.choice([None, None, 0, 1]),
            may_open=self.random.random() < 0.5,
            oldest_first=self.random.random() < 0.5,
        )


def test_frantic_orders_are_followed_and_every_row_is_right(tmp_path):
    c = cluster(tmp_path, 30, balance=Frantic)
    for i in range(3):
        c.start(f"w{i}")
    c.until(lambda: not c.workers, limit=8000)
    rows = c.check()
    assert sum(row["migrations"] for row in rows) > 10
    assert max(row["migrations"] for row in rows) > 1
