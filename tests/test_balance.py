"""The balance of a job: who opens what, who gives, who moves; the same calls, the same answers."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.core.balance import Balance
from bastion_batch.core.lengths import RowFacts
from bastion_batch.core.moving import HYSTERESIS_SECONDS
from bastion_batch.core.orders import Running, Status
from bastion_batch.core.rates import RateCurve, RateSample
from bastion_batch.core.row_order import Backlog
from bastion_batch.core.spans import PendingUnits

FAST = RateCurve(6560.0, 40.0, 50_000.0)
SLOW = RateCurve(820.0, 40.0, 6_000.0)
CRAWLING = RateCurve(82.0, 40.0, 600.0)
LIMIT = 4096
proven = settings(derandomize=True, deadline=None, max_examples=60)


class Job:
    """A balance and the workers that report to it, one second after the other."""

    def __init__(self, num_units=64, unit_rows=100, units_per_span=4, **workers):
        self.balance = Balance(
            spans=[unit // units_per_span for unit in range(num_units)],
            num_outputs=[unit_rows] * num_units,
        )
        self.num_units = num_units
        self.unit_rows = unit_rows
        self.now = 0.0
        self.curves = {}
        self.batches = {}
        self.running = {}
        self.backlogs = {}
        self.units = {}
        self.steps = Counter()
        for name, (curve, max_batch) in workers.items():
            self.join(int(name[1:]), curve, max_batch)

    def join(self, worker, curve, max_batch=64, kind=None):
        self.curves[worker], self.batches[worker] = curve, max_batch
        self.running[worker], self.backlogs[worker], self.units[worker] = [], 0, []
        self.balance.join(worker, kind=kind or str(curve), max_batch=max_batch, now=self.now)

    def lease(self, worker):
        unit = self.balance.lease(worker, self.now)
        if unit is not None:
            self.units[worker].append(unit)
            self.backlogs[worker] += self.unit_rows
        return unit

    def lease_all(self, worker):
        while self.lease(worker) is not None:
            pass

    def run(self, worker, unit, num_rows, num_tokens=50):
        facts = RowFacts(0, 100.0, LIMIT)
        first = len(self.running[worker])
        self.running[worker] += [
            Running(unit, (f"u{unit}-{worker}-{i}", 0), num_tokens, 30, facts)
            for i in range(first, first + num_rows)
        ]

    def status(self, worker):
        batch = min(len(self.running[worker]), self.batches[worker])
        curve = self.curves[worker]
        self.steps[worker] += 20
        return Status(
            running=tuple(self.running[worker]),
            backlog=Backlog(self.backlogs[worker], 200.0 * self.backlogs[worker]),
            sample=RateSample(batch, 1.0, curve.total(batch), 0.0) if batch else None,
            num_steps=self.steps[worker],
        )

    def report(self, worker):
        return self.balance.report(worker, self.status(worker), self.now)

    def reports(self, seconds=1):
        """The orders of all workers over so many seconds."""
        orders = {worker: [] for worker in self.running}
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.running:
                orders[worker].append(self.report(worker))
        return orders


# Units


def test_an_empty_worker_gets_a_unit_and_a_full_one_that_is_not_measured_no_more():
    job = Job(w1=(FAST, 64))
    assert job.lease(1) == 0
    assert job.lease(1) is None
    job.run(1, 0, 64)
    job.backlogs[1] = 36
    job.reports(2)
    assert job.lease(1) == 1, "measured, it may look ahead"


def test_units_are_opened_in_proportion_to_speed():
    job = Job(w1=(FAST, 64), w2=(SLOW, 64))
    for worker in (1, 2):
        job.lease(worker)
        job.run(worker, 0, 64)
    job.reports(3)
    for worker in (1, 2):
        job.lease_all(worker)
    ratio = FAST.total(64) / SLOW.total(64)
    assert len(job.units[1]) > 0.6 * ratio * len(job.units[2])
    assert len(job.units[1]) + len(job.units[2]) <= 2 * 8 + 2, "bounded, mean speed over mean"


def test_a_worker_streams_the_span_it_has_open():
    job = Job(num_units=32, units_per_span=8, w1=(FAST, 500), w2=(FAST, 500))
    for _ in range(5):
        for worker in (1, 2):
            job.lease(worker)
    assert job.units[1] == [0, 1, 2, 3, 4]
    assert job.units[2] == [8, 9, 10, 11, 12]


def test_units_of_a_lost_worker_go_to_others_but_for_those_that_are_done():
    job = Job(num_units=3, w1=(FAST, 250))
    job.lease_all(1)
    assert job.units[1] == [0, 1, 2]
    job.balance.lose(1, done=[1])
    job.balance.lose(1)
    job.balance.lose(99)
    job.join(2, FAST, 500)
    job.lease_all(2)
    assert job.units[2] == [0, 2]


def test_a_late_commit_of_a_former_owner_counts():
    job = Job(num_units=2, w1=(FAST, 150))
    job.lease_all(1)
    job.balance.lose(1)
    job.balance.finish(0)
    job.balance.finish(0)
    job.join(2, FAST, 500)
    job.lease_all(2)
    assert job.units[2] == [1]


def test_units_of_a_silent_owner_are_taken_back():
    job = Job(num_units=2, w1=(FAST, 150), w2=(FAST, 64))
    job.lease_all(1)
    job.run(1, 0, 100)
    job.reports(5)
    del job.running[1]
    for _ in range(5):
        job.reports(1)
    assert job.balance.sick(job.now) == frozenset()
    job.now += 18
    job.report(2)
    assert job.balance.sick(job.now) == {1}
    assert job.balance.take_back(job.now) == []
    job.now += 12
    job.report(2)
    assert job.balance.take_back(job.now) == [0, 1]
    assert job.balance.take_back(job.now) == []
    assert job.lease(2) is not None


def test_who_reports_but_makes_no_step_is_stuck():
    job = Job(w1=(FAST, 64))
    job.lease(1)
    job.run(1, 0, 10)
    job.reports(2)
    for _ in range(40):
        job.now += 1.0
        job.steps[1] -= 20
        job.report(1)
    assert job.balance.stuck(job.now, 30.0) == [1]
    assert job.balance.sick(job.now) == {1}


# Waiting rows


def all_open(job):
    """No unit is left to open, and a hundred rows wait at each worker."""
    for worker in job.running:
        job.lease(worker)
        job.run(worker, job.units[worker][0], job.batches[worker])
    while sum(map(len, job.units.values())) < job.num_units:
        job.backlogs = dict.fromkeys(job.running, 0)
        job.reports(1)
        for worker in job.running:
            job.lease(worker)
    job.backlogs = dict.fromkeys(job.running, 100)
    job.reports(2)


def test_a_late_joiner_is_given_rows_at_once():
    job = Job(num_units=8, unit_rows=100, w1=(FAST, 64), w2=(FAST, 64))
    all_open(job)
    job.join(3, FAST, 64)
    given = [share for orders in job.reports(2).values() for o in orders for share in o.shares]
    assert {share.to for share in given} == {3}
    assert 64 <= sum(share.num_rows for share in given) <= 64 + 200


def test_who_has_least_to_do_for_its_speed_is_given_rows_before_it_is_idle():
    job = Job(num_units=8, unit_rows=400, w1=(FAST, 64), w2=(FAST, 64))
    all_open(job)
    job.backlogs = {1: 100, 2: 2000}
    given = [share for o in job.reports(3)[2] for share in o.shares]
    assert {share.to for share in given} == {1}
    job.backlogs = {1: 1990, 2: 2000}
    job.reports(4)
    assert not any(o.shares for orders in job.reports(3).values() for o in orders)


def test_a_slow_worker_starts_none_of_the_last_rows_and_the_fastest_always_does():
    job = Job(num_units=4, unit_rows=100, w1=(FAST, 64), w2=(SLOW, 64))
    all_open(job)
    job.backlogs = {1: 6, 2: 6}
    orders = job.reports(5)
    assert orders[2][-1].max_running == 0
    assert orders[1][-1].max_running is None
    assert sum(share.num_rows for o in orders[2] for share in o.shares) >= 6


@proven
@given(st.lists(st.sampled_from([FAST, SLOW, CRAWLING]), min_size=1, max_size=5), st.data())
def test_the_pool_is_never_held_back_as_a_whole(curves, data):
    job = Job(num_units=6, **{f"w{i}": (curve, 8) for i, curve in enumerate(curves)})
    all_open(job)
    for worker in job.running:
        job.backlogs[worker] = data.draw(st.integers(0, 50))
    orders = job.reports(3)
    assert any(orders[worker][-1].max_running is None for worker in orders)


# Running rows


def in_tail(job, counts):
    """Nothing waits; so many rows run at each worker."""
    all_open(job)
    for worker, count in counts.items():
        job.running[worker] = []
        job.backlogs[worker] = 0
        job.run(worker, job.units[worker][0], count, num_tokens=300)


def moves_of(orders):
    return [move for answers in orders.values() for o in answers for move in o.moves]


def test_in_the_tail_rows_move_to_where_they_are_fast():
    job = Job(num_units=4, unit_rows=100, w1=(FAST, 64), w2=(SLOW, 64))
    in_tail(job, {1: 3, 2: 20})
    orders = job.reports(3)
    moves = moves_of(orders)
    assert moves
    assert all(move.to == 1 for move in moves)
    assert moves == [move for o in orders[2] for move in o.moves], "told to the owner"


def test_before_the_pool_is_empty_suspects_go_to_a_cleared_worker():
    others = {f"w{number}": (FAST, 256) for number in range(2, 6)}
    job = Job(num_units=40, unit_rows=200, w1=(RateCurve(2090.0, 24.0, 16_000.0), 96), **others)
    all_open(job)
    job.backlogs = dict.fromkeys(job.running, 400)
    assert {w for w, orders in job.reports(3).items() if orders[-1].max_running == 0} == {1}
    job.running[1], oldest = [], job.running[2][:3]
    job.running[2][:3] = [row._replace(num_tokens=2_000) for row in oldest]
    moves = moves_of(job.reports(2))
    assert {move.to for move in moves} == {1}
    assert {row.key for row in oldest} <= {move.key for move in moves}


def test_nothing_moves_while_rows_wait():
    job = Job(num_units=8, unit_rows=100, w1=(FAST, 64), w2=(SLOW, 64))
    all_open(job)
    assert not moves_of(job.reports(5))


def test_a_row_stays_for_a_while_where_it_was_moved():
    job = Job(num_units=4, unit_rows=100, w1=(FAST, 64), w2=(SLOW, 64))
    in_tail(job, {1: 3, 2: 40})
    moved = {}
    for _ in range(12):
        for move in moves_of(job.reports(1)):
            assert job.now - moved.get(move.key, -100.0) >= HYSTERESIS_SECONDS
            moved[move.key] = job.now


def test_all_rows_of_a_worker_that_leaves_move_at_once():
    job = Job(num_units=12, unit_rows=100, w1=(FAST, 64), w2=(SLOW, 64), w3=(FAST, 64))
    all_open(job)
    job.balance.dismiss(1)
    orders = job.reports(2)
    assert {move.key for move in moves_of(orders)} == {row.key for row in job.running[1]}
    assert all(move.to in (2, 3) for move in moves_of(orders))
    assert orders[1][-1].max_running == 0
    assert not orders[1][-1].may_open
    assert job.lease(1) is None
    by_target = Counter(move.to for move in moves_of(orders))
    assert by_target[3] > by_target[2], "the faster one takes more"


def test_a_leaving_worker_is_emptied_even_before_anyone_was_measured():
    job = Job(num_units=4, w1=(FAST, 64), w2=(FAST, 64))
    job.lease(1)
    job.run(1, 0, 5)
    job.balance.dismiss(1)
    job.curves = dict.fromkeys(job.curves, RateCurve(0.0, 1.0, 1.0))
    assert len(moves_of(job.reports(1))) == 5


def test_refused_rows_are_tried_by_the_emptiest_other_worker():
    job = Job(w1=(FAST, 64), w2=(FAST, 64), w3=(FAST, 64))
    for worker, count in ((1, 5), (2, 3), (3, 9)):
        job.run(worker, 0, count)
    job.reports(1)
    assert job.balance.other_worker([]) == 2
    assert job.balance.other_worker([2]) == 1
    job.balance.dismiss(1)
    assert job.balance.other_worker([2]) == 3
    assert job.balance.other_worker([2, 3]) is None


def test_a_sick_worker_tries_a_refused_row_only_if_nobody_else_can():
    job = Job(w1=(FAST, 64), w2=(FAST, 64))
    for worker, count in ((1, 5), (2, 3)):
        job.run(worker, 0, count)
    job.reports(1)
    job.reports(2)
    job.balance._sick = frozenset({2})
    assert job.balance.other_worker([]) == 1
    assert job.balance.other_worker([1]) == 2


# When


def test_the_forecast_counts_waiting_rows_and_the_tail():
    job = Job(num_units=8, unit_rows=100, w1=(FAST, 64))
    assert job.balance.eta(0.0) is None
    in_tail(job, {1: 1})
    tail = job.balance.eta(job.now)
    assert tail is None, "nothing has ended: no length is known"


# Everything


class Story(Job):
    """A job to which anything may happen, and what was answered."""

    def __init__(self):
        super().__init__(num_units=10, unit_rows=20)

    def do(self, action, worker, number):
        """The answer, or None where the action makes no sense now."""
        if (worker in self.running) == (action == "joins"):
            return None
        return getattr(self, action)(worker, number)

    def joins(self, worker, number):
        self.join(worker, FAST if worker % 2 else SLOW, 16)

    def leases(self, worker, number):
        return self.lease(worker)

    def reports_that(self, worker, number):
        self.now += 0.3
        self.backlogs[worker] = number if self.units[worker] else 0
        self.running[worker] = []
        for unit in self.units[worker][:1]:
            self.run(worker, unit, min(number, 16))
        return self.report(worker)

    def is_lost(self, worker, number):
        self.balance.lose(worker)
        del self.running[worker], self.units[worker]

    def is_dismissed(self, worker, number):
        self.balance.dismiss(worker)

    def commits(self, worker, number):
        self.balance.finish(number % 10)
        self.forget([number % 10])
        return number % 10

    def waits(self, worker, number):
        self.now += number / 4
        taken = self.balance.take_back(self.now)
        self.forget(taken)
        return taken

    def forget(self, gone):
        for units in self.units.values():
            units[:] = [unit for unit in units if unit not in gone]


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["reports_that", "leases", "is_lost", "joins", "is_dismissed", "commits", "waits"]
        ),
        st.integers(1, 4),
        st.integers(0, 80),
    ),
    max_size=60,
)


@proven
@given(actions)
def test_whatever_happens_units_have_one_owner_and_orders_make_sense(steps):
    """Two balances told the same say the same; no order names a worker that is gone."""
    story, twin = Story(), Story()
    finished = set()
    for action, worker, number in steps:
        answer = story.do(action, worker, number)
        assert twin.do(action, worker, number) == answer
        owners = [(unit, w) for w, units in story.units.items() for unit in units]
        assert len(dict(owners)) == len(owners), "one owner each"
        assert not finished.intersection(dict(owners))
        if action == "commits" and answer is not None:
            finished.add(answer)
        if action == "reports_that" and answer is not None:
            targets = {order.to for order in (*answer.moves, *answer.shares)}
            assert targets <= set(story.running)
            assert worker not in {share.to for share in answer.shares}
            assert all(share.num_rows > 0 for share in answer.shares)
            assert all(dict(owners)[move.unit] == worker for move in answer.moves)


@proven
@given(st.data())
def test_a_job_ends_with_every_unit_leased_once(data):
    """Nobody starves: while units are left, an idle worker that stays gets one."""
    num_units = data.draw(st.integers(1, 20))
    job = Job(num_units=num_units, unit_rows=10, w1=(FAST, 8), w2=(SLOW, 8), w3=(SLOW, 8))
    leased = []
    while len(leased) < num_units:
        worker = data.draw(st.integers(1, 3))
        job.backlogs[worker] = 0
        job.running[worker] = []
        job.reports(1)
        unit = job.lease(worker)
        if unit is None:  # the last rows are left to the fastest
            job.backlogs[1], job.running[1] = 0, []
            job.reports(1)
            unit = job.lease(1)
        assert unit is not None
        leased.append(unit)
        job.balance.finish(unit)
    assert sorted(leased) == list(range(num_units))


# Spans


def test_runs_are_split_only_when_nothing_is_free():
    pending = PendingUnits([0] * 8 + [1] * 4, range(12))
    assert [pending.take(1), pending.take(2), pending.take(3)] == [0, 8, 4]
    assert len(pending) == 9
    assert [pending.take(1) for _ in range(3)] == [1, 2, 3]


def test_removed_units_are_never_taken():
    pending = PendingUnits([0] * 6, range(6))
    assert pending.take(1) == 0
    pending.remove(1)
    pending.remove(5)
    assert len(pending) == 3
    assert [pending.take(1) for _ in range(4)] == [2, 3, 4, None]
    pending.put_back([3])
    assert pending.take(2) == 3
    assert len(pending) == 0


@proven
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=80))
def test_every_pending_unit_is_taken_once(steps):
    spans = [unit // 5 for unit in range(20)]
    pending, left = PendingUnits(spans, range(20)), set(range(20))
    for action, number in steps:
        match action:
            case 0 | 1:
                unit = pending.take(number % 4)
                assert (unit in left) if left else unit is None
                left.discard(unit)
            case 2 if number < 20 and number not in left:
                pending.put_back([number])
                left.add(number)
            case 3 if number in left:
                pending.remove(number)
                left.discard(number)
            case 4:
                pending.release(number % 4)
        assert len(pending) == len(left)
    assert sorted(iter(lambda: pending.take(0), None)) == sorted(left)
