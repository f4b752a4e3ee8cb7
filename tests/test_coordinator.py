"""The coordinator against random schedules of leases, commits, losses and late messages."""

from weakref import WeakKeyDictionary

import pytest
from balances import PlainBalance
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.messages import (
    Directions,
    Done,
    FaultCount,
    Held,
    InFlight,
    Lease,
    Owned,
    Ownership,
    Refused,
    Suspect,
    UnitSummary,
    Wait,
    WorkerReport,
)
from bastion_batch.core.balance import Balance
from bastion_batch.core.lengths import GroupSums, RowFacts
from bastion_batch.core.orders import Backlog, Eta, Orders, RowMove, Share
from bastion_batch.core.rates import RateSample
from bastion_batch.records import End, EngineTotals, measured_speedup

ENGINE = {"device": "scripted", "max_batch": 10**6}
FACTS = RowFacts(group=5, prompt_size=120.0, max_new_tokens=64)
SUMMARY = UnitSummary(num_outputs=4, num_failed=0, won=True)


balances = WeakKeyDictionary()
"""Of the coordinators of the running test."""


def coordinator(num_units=4, *, spans=None, done=(), max_open_units=8, balance=PlainBalance):
    made = []

    def make(**units):
        made.append(balance(**units))
        return made[0]

    c = Coordinator(
        spans=spans or [0] * num_units,
        num_outputs=[4] * (len(spans) if spans else num_units),
        done=done,
        max_open_units=max_open_units,
        balance=make,
    )
    balances[c] = made[0]
    return c


def lease_all(c, attempt):
    """Lease until refused."""
    leases = []
    while isinstance(reply := c.lease(attempt, 0.0), Lease):
        leases.append(reply)
    return leases


def commit(c, attempt, lease, summary=SUMMARY):
    c.committed(attempt, lease.unit, lease.epoch, summary, 0.0)


def test_one_worker_takes_units_in_order_and_finishes():
    c = coordinator(3)
    c.register("w0", 1, ENGINE, 0.0)
    leases = lease_all(c, 1)
    assert [lease.unit for lease in leases] == [0, 1, 2]
    assert isinstance(c.lease(1, 0.0), Wait)
    for lease in leases:
        commit(c, 1, lease)
    assert c.lease(1, 0.0) == Done(drained=False)
    assert c.progress(0.0).finished


def test_open_units_are_bounded():
    c = coordinator(20, max_open_units=3)
    c.register("w0", 1, ENGINE, 0.0)
    leases = lease_all(c, 1)
    assert len(leases) == 3
    commit(c, 1, leases[0])
    assert isinstance(c.lease(1, 0.0), Lease)


def test_committed_units_of_earlier_invocations_are_not_leased():
    c = coordinator(4, done={0, 2})
    c.register("w0", 1, ENGINE, 0.0)
    assert [lease.unit for lease in lease_all(c, 1)] == [1, 3]
    assert c.progress(0.0).num_committed == 8


def test_a_lost_workers_units_come_back_in_order_with_a_higher_epoch():
    c = coordinator(5)
    c.register("w0", 1, ENGINE, 0.0)
    c.register("w1", 2, ENGINE, 0.0)
    mine = [c.lease(1, 0.0) for _ in range(3)]
    commit(c, 1, mine[1])
    c.worker_lost(1, (), 0.0)
    assert [lease[:2] for lease in lease_all(c, 2)] == [(0, 2), (2, 2), (3, 1), (4, 1)]


def test_a_lost_worker_is_told_to_stop_and_its_late_commit_is_dropped():
    c = coordinator(2)
    c.register("w0", 1, ENGINE, 0.0)
    c.register("w0", 2, ENGINE, 0.0)
    late = c.lease(1, 0.0)
    c.worker_lost(1, (), 0.0)
    assert c.lease(1, 0.0) == Done(drained=True)
    commit(c, 1, late)
    again = c.lease(2, 0.0)
    commit(c, 1, late)
    assert (c.num_dropped, c.progress(0.0).num_units_done) == (2, 0)
    commit(c, 2, again)
    assert c.progress(0.0).num_units_done == 1


def test_a_unit_whose_file_exists_is_done_even_if_its_message_was_lost():
    c = coordinator(2)
    c.register("w0", 1, ENGINE, 0.0)
    assert len(lease_all(c, 1)) == 2
    c.worker_lost(1, {1}, 0.0)
    c.register("w0", 2, ENGINE, 0.0)
    assert [lease[:2] for lease in lease_all(c, 2)] == [(0, 2)]


def test_losing_a_worker_twice_or_before_it_registered_changes_nothing():
    c = coordinator(2)
    c.worker_lost(1, (), 0.0)
    c.register("w0", 1, ENGINE, 0.0)
    assert c.lease(1, 0.0) == Done(drained=True)
    c.register("w0", 2, ENGINE, 0.0)
    lease_all(c, 2)
    c.worker_lost(2, (), 0.0)
    c.worker_lost(2, (), 0.0)
    c.register("w0", 3, ENGINE, 0.0)
    assert len(lease_all(c, 3)) == 2


def test_draining_leases_nothing_more_and_still_takes_commits():
    c = coordinator(3)
    c.register("w0", 1, ENGINE, 0.0)
    lease = c.lease(1, 0.0)
    c.drain()
    assert c.lease(1, 0.0) == Done(drained=True)
    commit(c, 1, lease)
    assert c.progress(0.0).num_units_done == 1


def test_workers_stream_spans_of_their_own_and_split_the_last_one():
    spans = [0] * 4 + [1] * 4
    c = coordinator(spans=spans, max_open_units=100)
    for attempt in (1, 2, 3):
        c.register(f"w{attempt}", attempt, ENGINE, 0.0)
    first, second = c.lease(1, 0.0), c.lease(2, 0.0)
    assert (first.unit, second.unit) == (0, 4)
    third = c.lease(3, 0.0)
    assert third.unit == 2, "the upper half of the longest run"
    assert c.lease(1, 0.0).unit == 1
    assert c.lease(3, 0.0).unit == 3


def test_progress_counts_outputs_rate_and_time_left():
    c = coordinator(2)
    c.register("w0", 1, ENGINE, 10.0)
    lease = c.lease(1, 10.0)
    for second in range(5):
        counts = EngineTotals(
            num_row_steps=10 * second,
            num_committed=30 * second,
            num_decoded=25 * second,
            num_nodes=50,
        )
        c.report(1, WorkerReport(counts, 1, second, 20 * second), 10.0 + second)
    balances[c].next_eta = Eta(seconds=12.5, tail_seconds=2.5)
    progress = c.progress(14.0)
    assert progress.elapsed_seconds == 4.0
    assert progress.tokens_per_second == pytest.approx(30.0)
    assert progress.tokens_per_step == pytest.approx(2.5)
    assert progress.mean_nodes == pytest.approx(50 / 40)
    assert (progress.num_done, progress.num_outputs) == (1, 8)
    assert (progress.eta_seconds, progress.tail_seconds) == (12.5, 2.5)
    commit(c, 1, lease, UnitSummary(4, 1, won=True))
    assert c.progress(14.0).num_failed == 1


def test_speedup_weighs_each_device_by_its_own_plain_rate():
    fast = EngineTotals(plain_tokens=100, plain_seconds=1.0, paired_tokens=200, paired_seconds=1.0)
    slow = EngineTotals(plain_tokens=10, plain_seconds=1.0, paired_tokens=30, paired_seconds=1.0)
    assert measured_speedup([fast]) == pytest.approx(2.0)
    assert measured_speedup([fast, slow]) == pytest.approx(2.5)
    assert measured_speedup([EngineTotals(), fast]) == pytest.approx(2.0)
    assert measured_speedup([EngineTotals(plain_tokens=3, plain_seconds=1.0)]) is None


def report(c, attempt, *rows, now=0.0, num_steps=0, **fields):
    """Report these rows; what the coordinator answers."""
    counts = EngineTotals(num_steps=num_steps)
    values = {"num_uncommitted": 0, "num_finished": 0, "num_finished_tokens": 0} | fields
    return c.report(attempt, WorkerReport(counts, **values, rows=rows), now)


def row(number, unit, epoch=1, *, live=True, facts=None):
    return InFlight(f"r{number}", 0, unit, epoch, 0, live, facts=facts)


def two_workers(**options):
    c = coordinator(4, **options)
    c.register("w0", 1, ENGINE, 0.0)
    c.register("w1", 2, ENGINE, 0.0)
    return c


def test_a_new_owner_is_told_who_has_rows_of_its_unit():
    c = two_workers()
    unit = c.lease(1, 0.0).unit
    report(c, 2, row(7, unit), row(8, unit, live=False), row(9, 3))
    c.worker_lost(1, (), 0.0)
    lease = next(lease for lease in lease_all(c, 2) if lease.unit == unit)
    assert lease.epoch == 2
    assert lease.held == (Held("r7", 0, 2), Held("r8", 0, 2))


def test_who_has_rows_of_a_unit_is_told_of_its_new_owner_and_of_its_end():
    c = two_workers()
    c.register("w2", 3, ENGINE, 0.0)
    unit = c.lease(1, 0.0).unit
    assert report(c, 2, row(7, unit)).owners == ()
    c.worker_lost(1, (), 0.0)
    assert report(c, 2, row(7, unit)).owners == ()
    lease = next(lease for lease in lease_all(c, 3) if lease.unit == unit)
    for _ in range(2):
        assert report(c, 2, row(7, unit)).owners == (Ownership(unit, 2, 3),)
    assert report(c, 2, row(7, unit, epoch=2)).owners == ()
    commit(c, 3, lease)
    assert report(c, 2, row(7, unit, epoch=2)).released == (unit,)


def test_an_owner_is_told_which_of_its_helpers_are_gone():
    c = two_workers()
    c.lease(1, 0.0)
    assert report(c, 1, away_at=(2,)).lost == ()
    c.worker_lost(2, (), 0.0)
    assert report(c, 1, away_at=(2, 9)).lost == (2, 9)


def test_what_the_balance_orders_is_told_to_the_letter():
    c = two_workers()
    c.lease(1, 0.0)
    orders = Orders(
        max_running=0,
        may_open=False,
        oldest_first=True,
        moves=(RowMove(3, ("nobody's", 7), 99), RowMove(0, ("r1", 0), 1)),
        shares=(Share(99, 10**6), Share(1, 0)),
    )
    balances[c].say(1, **orders._asdict())
    assert report(c, 2).orders == Orders()
    assert report(c, 1).orders == orders
    assert report(c, 1).orders == orders._replace(moves=(), shares=()), "said once"


def test_the_balance_hears_all_that_it_decides_by():
    c = two_workers()
    lease = c.lease(1, 0.0)
    before = EngineTotals(num_steps=10, num_row_steps=30, num_committed=90, step_seconds=1.0)
    now = before._replace(num_steps=14, num_row_steps=50, num_committed=150, step_seconds=1.5)
    c.report(1, WorkerReport(before, 0, 0, 0), 1.0)
    running = InFlight("r1", 2, lease.unit, 1, 17, True, 30, FACTS)
    waiting = InFlight("r2", 0, 3, 1, 4, False, 31, FACTS)
    ended = InFlight("r3", 0, 3, 1, 9, False)
    sums = {5: GroupSums(count=2.0)}
    c.report(
        1,
        WorkerReport(
            now,
            0,
            0,
            0,
            rows=(running, waiting, ended),
            backlog=Backlog(12, 900.0),
            lengths=sums,
        ),
        2.0,
    )
    status = balances[c].statuses[1]
    assert [(r.unit, r.key, r.num_tokens, r.num_prompt_tokens) for r in status.running] == [
        (lease.unit, ("r1", 2), 17, 30),
        (3, ("r2", 0), 4, 31),
    ]
    assert status.sample == RateSample(batch=5.0, seconds=0.5, tokens=60)
    assert (status.backlog, status.lengths, status.num_steps) == (Backlog(12, 900.0), sums, 14)


def test_a_unit_taken_back_gets_another_owner_and_the_old_one_is_told_when_it_comes_round():
    c = two_workers()
    lease = c.lease(1, 0.0)
    balances[c].to_take_back = [lease.unit]
    report(c, 2, row(7, lease.unit))
    report(c, 1, row(8, lease.unit), owned=(Owned(lease.unit, 1),))
    again = next(reply for reply in lease_all(c, 2) if reply.unit == lease.unit)
    assert again.epoch == 2
    assert again.held == (Held("r7", 0, 2),), "what the silent one has is not waited for"
    told = report(c, 1, owned=(Owned(lease.unit, 1),))
    assert told.owners == (Ownership(lease.unit, 2, 2),)
    assert not told.drain


@pytest.mark.parametrize("has_new_owner", [False, True])
def test_a_file_that_a_silent_owner_made_counts(has_new_owner):
    c = two_workers()
    lease = c.lease(1, 0.0)
    balances[c].to_take_back = [lease.unit]
    report(c, 2)
    if has_new_owner:
        lease_all(c, 2)
    commit(c, 1, lease)
    assert c.progress(0.0).num_units_done == 1
    assert all(reply.unit != lease.unit for reply in lease_all(c, 2))
    if has_new_owner:
        assert report(c, 2, owned=(Owned(lease.unit, 2),)).released == (lease.unit,)


def test_rows_at_a_sick_worker_are_their_owners_to_decode_again():
    c = two_workers()
    balances[c].sick_workers = frozenset({2})
    assert report(c, 1, away_at=(2,)).lost == (2,)
    balances[c].sick_workers = frozenset()
    assert report(c, 1, away_at=(2,)).lost == ()


def test_the_next_owner_of_a_dismissed_workers_unit_knows_where_its_rows_went():
    c = two_workers()
    lease = c.lease(1, 0.0)
    c.dismiss(1)
    balances[c].say(1, moves=[RowMove(lease.unit, ("r7", 0), 2), RowMove(lease.unit, ("r8", 0), 9)])
    assert report(c, 1).drain
    c.give_back(1, *lease[:2], 0.0)
    again = next(reply for reply in lease_all(c, 2) if reply.unit == lease.unit)
    assert again.held == (Held("r7", 0, 2),)


def test_a_dismissed_worker_gives_its_units_back_and_its_rows_are_no_suspects():
    c = two_workers()
    lease = c.lease(1, 0.0)
    report(c, 1, row(7, lease.unit))
    c.dismiss(1)
    assert isinstance(c.lease(1, 0.0), Wait), "its report is answered with where its rows go"
    assert report(c, 1).drain
    c.give_back(1, *lease[:2], 0.0)
    c.give_back(1, *lease[:2], 0.0)
    c.worker_lost(1, (), 0.0)
    again = next(reply for reply in lease_all(c, 2) if reply.unit == lease.unit)
    assert (again.epoch, again.suspects) == (2, ())
    assert c.num_dropped == 1


def test_rows_that_were_in_an_engine_when_it_ended_are_suspects():
    c = two_workers()
    unit = c.lease(1, 0.0).unit
    report(c, 1, row(7, unit), row(8, unit, live=False), row(9, 3, live=True))
    c.worker_lost(1, (), 0.0)
    c.register("w0", 3, ENGINE, 0.0)
    leases = {lease.unit: lease for lease in lease_all(c, 3)}
    assert leases[unit].suspects == (Suspect("r7", 0, frozenset({End("w0", 1)})),)
    assert leases[3].suspects == (Suspect("r9", 0, frozenset({End("w0", 1)})),)
    report(c, 3, row(7, unit, epoch=2))
    c.worker_lost(3, (), 0.0)
    again = next(lease for lease in lease_all(c, 2) if lease.unit == unit)
    assert again.suspects == (Suspect("r7", 0, frozenset({End("w0", 1), End("w0", 3)})),)
    assert not again.lone_worker


def test_whose_steps_stand_still_with_rows_is_stuck():
    c = two_workers()
    report(c, 1, row(7, 0, facts=FACTS), num_steps=5, now=10.0)
    report(c, 2, now=10.0)
    report(c, 1, row(7, 0, facts=FACTS), num_steps=5, now=100.0)
    report(c, 2, now=100.0)
    assert c.stuck(100.0, 60.0) == [1]
    report(c, 1, row(7, 0, facts=FACTS), num_steps=6, now=101.0)
    assert c.stuck(102.0, 60.0) == []
    assert c.stuck(162.0, 60.0) == [1, 2], "who says nothing makes no progress either"
    c.worker_lost(1, (), 162.0)
    assert c.stuck(170.0, 60.0) == [2]


def test_a_refused_row_goes_to_the_emptiest_other_worker_until_all_have_refused_it():
    c = two_workers()
    c.register("w2", 3, ENGINE, 0.0)
    unit = c.lease(1, 0.0).unit
    report(c, 2, row(5, 3, facts=FACTS))
    refused = Refused(unit, "r7", 0, (1,))
    assert report(c, 1, refused=(refused,)).orders.moves == (RowMove(unit, ("r7", 0), 3),)
    refused = Refused(unit, "r7", 0, (1, 3))
    assert report(c, 1, refused=(refused,)).orders.moves == (RowMove(unit, ("r7", 0), 2),)
    refused = Refused(unit, "r7", 0, (1, 3, 2))
    assert report(c, 1, refused=(refused,)) == Directions(hopeless=(refused,))


def faults(unit, **kinds):
    return tuple(FaultCount(unit, kind, n, f"{kind} of a row") for kind, n in kinds.items())


def test_the_breaker_stops_a_job_of_which_most_rows_fail_alike():
    c = coordinator(spans=[0] * 100)
    c.register("w0", 1, ENGINE, 0.0)
    c.lease(1, 0.0)
    few = report(c, 1, num_uncommitted=19, faults=faults(0, null_prompt=19))
    assert (few.drain, few.may_commit_faults) == (False, False)
    many = report(c, 1, num_uncommitted=21, faults=faults(0, null_prompt=11, empty_prompt=10))
    assert (many.drain, many.may_commit_faults) == (True, False)
    failure = c.progress(0.0).failure
    assert failure == "11 of the first 21 outputs failed, null_prompt: null_prompt of a row"
    assert c.lease(1, 0.0) == Done(drained=True)


def test_the_breaker_lets_a_job_go_on_whose_rows_fail_in_different_ways():
    c = coordinator(spans=[0] * 100)
    c.register("w0", 1, ENGINE, 0.0)
    c.lease(1, 0.0)
    mixed = report(c, 1, num_uncommitted=40, faults=faults(0, null_prompt=20, empty_prompt=20))
    assert (mixed.drain, mixed.may_commit_faults) == (False, False)
    good = report(c, 1, num_uncommitted=240, faults=faults(0, null_prompt=140))
    assert (good.drain, good.may_commit_faults) == (False, True)
    late = report(c, 1, num_uncommitted=390, faults=faults(0, null_prompt=290))
    assert (late.drain, late.may_commit_faults) == (False, True)


def test_the_breaker_counts_the_outputs_of_lost_workers_once():
    c = coordinator(spans=[0] * 100)
    for attempt in (1, 2, 3):
        c.register("w0", attempt, ENGINE, 0.0)
        c.lease(attempt, 0.0)
        answer = report(c, attempt, num_uncommitted=12, faults=faults(0, null_prompt=12))
        assert not answer.drain
        c.worker_lost(attempt, (), 0.0)
    assert c.progress(0.0).failure is None


def test_the_breaker_has_no_say_in_a_job_that_is_well_under_way():
    c = coordinator(spans=[0] * 100, done=range(25))
    c.register("w0", 1, ENGINE, 0.0)
    c.lease(1, 0.0)
    answer = report(c, 1, num_uncommitted=40, faults=faults(30, null_prompt=40))
    assert (answer.drain, answer.may_commit_faults) == (False, True)


def test_a_small_job_may_commit_its_faults_once_every_output_is_terminal():
    c = coordinator(3)
    c.register("w0", 1, ENGINE, 0.0)
    lease_all(c, 1)
    assert not report(c, 1, num_uncommitted=11, faults=faults(0, a=4)).may_commit_faults
    assert report(c, 1, num_uncommitted=12, faults=faults(0, a=5)).may_commit_faults


class _Schedule:
    """Drives a coordinator at random and checks its promises after every call."""

    def __init__(self, data, spans, num_workers, balance):
        self.draw = data.draw
        self.c = coordinator(
            spans=spans, max_open_units=self.draw(st.integers(1, 4)), balance=balance
        )
        self.num_units = len(spans)
        self.next_attempt = 1
        self.live = {}
        self.zombies = []
        self.files = {}
        self.epochs = [0] * len(spans)
        for name in range(num_workers):
            self.start(name)

    def start(self, name):
        self.c.register(f"w{name}", self.next_attempt, ENGINE, 0.0)
        self.live[self.next_attempt] = (name, {})
        self.next_attempt += 1

    def step(self, may_lose):
        attempt = self.draw(st.sampled_from(sorted(self.live)))
        name, held = self.live[attempt]
        action = self.draw(st.sampled_from(["lease", "commit", "late", "lose"]))
        if action == "lease":
            self.lease(attempt, held)
        elif action == "commit" and held:
            unit = self.draw(st.sampled_from(sorted(held)))
            self.commit(attempt, unit, held.pop(unit))
        elif action == "late" and self.zombies:
            self.c.committed(*self.draw(st.sampled_from(self.zombies)), SUMMARY, 0.0)
        elif action == "lose" and may_lose:
            self.lose(attempt, name, held)

    def lease(self, attempt, held):
        reply = self.c.lease(attempt, 0.0)
        if not isinstance(reply, Lease):
            return
        owned = {unit for _, units in self.live.values() for unit in units}
        assert reply.unit not in owned, "two live owners"
        assert reply.unit not in self.files, "leased although committed"
        assert reply.epoch == self.epochs[reply.unit] + 1
        self.epochs[reply.unit] = reply.epoch
        held[reply.unit] = reply.epoch

    def commit(self, attempt, unit, epoch):
        assert unit not in self.files
        self.files[unit] = attempt
        if self.draw(st.booleans()):
            self.c.committed(attempt, unit, epoch, SUMMARY, 0.0)
        else:  # the worker dies after its file exists and before word of it arrives
            name, held = self.live[attempt]
            self.lose(attempt, name, held)

    def lose(self, attempt, name, held):
        self.c.worker_lost(attempt, set(self.files), 0.0)
        self.zombies += [(attempt, unit, epoch) for unit, epoch in held.items()]
        del self.live[attempt]
        self.start(name)

    def finish(self):
        for _ in range(4 * self.num_units + 8):
            for attempt, (_, held) in list(self.live.items()):
                self.lease(attempt, held)
                for unit in list(held):
                    self.c.committed(attempt, unit, held.pop(unit), SUMMARY, 0.0)
                    self.files[unit] = attempt
            if self.c.progress(0.0).finished:
                return
        raise AssertionError("the job does not end")


@pytest.mark.parametrize("balance", [PlainBalance, Balance])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), span_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
       num_workers=st.integers(1, 4))  # fmt: skip
def test_any_schedule_ends_with_every_unit_done_once(balance, data, span_sizes, num_workers):
    spans = [span for span, size in enumerate(span_sizes) for _ in range(size)]
    schedule = _Schedule(data, spans, num_workers, balance)
    for _ in range(data.draw(st.integers(0, 60))):
        schedule.step(may_lose=True)
    schedule.finish()
    assert set(schedule.files) == set(range(len(spans)))
    progress = schedule.c.progress(0.0)
    assert progress.num_committed == progress.num_outputs == 4 * len(spans)
    assert all(schedule.c.lease(a, 0.0) == Done(drained=False) for a in schedule.live)


def test_outcomes_of_a_unit_taken_back_count_once():
    c = two_workers()
    lease = c.lease(1, 0.0)
    owned = (Owned(lease.unit, 1, 3),)
    faults = (FaultCount(lease.unit, "null_prompt", 3, "no prompt"),)
    report(c, 1, num_uncommitted=3, owned=owned, faults=faults)
    balances[c].to_take_back = [lease.unit]
    report(c, 2)
    assert c.progress(0.0).num_done == 0, "its next owner says again what is terminal"
    lease_all(c, 2)
    report(c, 2, num_uncommitted=3, owned=(Owned(lease.unit, 2, 3),))
    assert c.progress(0.0).num_done == 3
    report(c, 1, num_uncommitted=3, owned=owned, faults=faults)
    assert c.progress(0.0).num_done == 3, "the former owner does not know yet"


def test_the_breaker_does_not_see_the_faults_of_a_unit_twice():
    c = coordinator(6)
    c.register("w0", 1, ENGINE, 0.0)
    c.register("w1", 2, ENGINE, 0.0)
    lease = c.lease(1, 0.0)
    faults = (FaultCount(lease.unit, "null_prompt", 11, "no prompt"),)
    report(c, 1, num_uncommitted=11, owned=(Owned(lease.unit, 1, 11),), faults=faults)
    balances[c].to_take_back = [lease.unit]
    report(c, 2)
    lease_all(c, 2)
    report(c, 2, num_uncommitted=11, owned=(Owned(lease.unit, 2, 11),), faults=faults)
    report(c, 1, num_uncommitted=11, owned=(Owned(lease.unit, 1, 11),), faults=faults)
    assert c.progress(0.0).failure is None
