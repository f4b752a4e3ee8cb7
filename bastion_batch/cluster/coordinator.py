"""The books of a job: owners and epochs of units, who holds which rows, faults, progress.

A plain class: no Ray, no files, no clock (every call is told the time). It sees metadata only,
never a row, and its memory grows with the number of units, not with the data.

    pending --lease--> open (owner, epoch) --committed--> done
       ^                        |
       └-- worker_lost, --------┘        the next owner's epoch is higher by one
           give_back, taken back

A unit's file is the truth and this is bookkeeping: a unit committed twice is one file, and a
message that carries an epoch or an attempt no longer current is counted and dropped, because its
sender has been given up. Each attempt (one incarnation of a worker) has a number of its own.

It decides nothing about who decodes what: `core.balance` does. It tells the balance what workers
say, and workers what the balance orders.

It calls nobody. A worker reports about once a second what it has, and the answer says what the
worker should know: who of its helpers is gone, who owns now the units whose rows it has, what to
move, whether to end. The answer follows from the report and from the state here, so that any
message may be lost: the next report is answered again. Any worker may die at any time; whoever
notices calls `worker_lost`, once or more often, before or after its last messages arrive.

The owner of a unit alone says where its rows are decoded: moves and shares only ask it to. A unit
is taken back from an owner that is silent; should it come round, it goes on as a helper of the
next one, and if it had made the unit's file by then, that file counts.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bastion_batch.cluster.faults import BREAKER_SUCCESSES, Breaker, Suspicions
from bastion_batch.cluster.messages import (
    AttemptRecord,
    Directions,
    Done,
    Held,
    Lease,
    LeaseReply,
    Ownership,
    Progress,
    UnitSummary,
    Wait,
    WorkerReport,
)
from bastion_batch.cluster.tally import (
    Attempt,
    Rate,
    UnitCounts,
    num_tokens,
    progress_of,
    status_of,
)
from bastion_batch.core.balance import Balance
from bastion_batch.core.orders import Orders, RowMove
from bastion_batch.records import End, RowKey

MAX_OPEN_UNITS = 8
WAIT_SECONDS = 1.0


class _Owner(NamedTuple):
    attempt: int
    epoch: int


class Coordinator:
    """Hands out the units of one job and keeps count. Not safe for threads: an actor's state."""

    def __init__(
        self,
        *,
        spans: Sequence[int],
        num_outputs: Sequence[int],
        done: Collection[int] = (),
        max_open_units: int = MAX_OPEN_UNITS,
        faults_expected: bool = False,
        balance: Callable[..., Balance] = Balance,
    ) -> None:
        """Describe the units by span and number of outputs; those in `done` are committed.

        Where faults are expected, because failed rows are decoded again, they stop nothing.
        `balance` makes what decides.
        """
        self._balance = balance(
            spans=spans, num_outputs=num_outputs, done=done, max_open_units=max_open_units
        )
        self._counts = UnitCounts(num_outputs, done)
        self._epochs = array("l", bytes(array("l").itemsize * len(spans)))
        self._open: dict[int, _Owner] = {}
        self._taken_back: dict[int, _Owner] = {}
        self._moved: dict[int, dict[RowKey, int]] = {}
        self._attempts: dict[int, Attempt] = {}
        self._never_registered: set[int] = set()
        self._suspicions = Suspicions()
        num_succeeded = BREAKER_SUCCESSES if faults_expected else self._counts.num_committed
        self._breaker = Breaker(num_succeeded)
        self._num_dropped = 0
        self._draining = False
        self._started: float | None = None
        self._rate = Rate()

    @property
    def num_dropped(self) -> int:
        """Messages dropped because their sender had been given up."""
        return self._num_dropped

    # What workers say

    def register(self, worker: str, attempt: int, info: Mapping[str, Any], now: float) -> None:
        """Admit an incarnation of a worker; its engine is loaded."""
        if self._started is None:
            self._started = now
        if attempt in self._never_registered or attempt in self._attempts:
            return
        self._attempts[attempt] = Attempt(worker, attempt, info)
        kind, max_batch = _kind(info), int(info.get("max_batch", 1))
        self._balance.join(attempt, kind=kind, max_batch=max_batch, now=now)

    def lease(self, attempt: int, now: float) -> LeaseReply:
        """Give this worker one more unit, or say why not."""
        state = self._attempts.get(attempt)
        if state is None or not state.live or self._is_ending_all:
            return Done(drained=True)
        if self._counts.is_complete:
            return Done(drained=False)
        # One that leaves is told so with the answer to its report, which says where its rows go.
        unit = None if state.leaving else self._balance.lease(attempt, now)
        if unit is None:
            return Wait(WAIT_SECONDS)
        self._epochs[unit] += 1
        self._open[unit] = _Owner(attempt, self._epochs[unit])
        state.units.add(unit)
        return Lease(
            unit,
            self._epochs[unit],
            held=tuple(self._held(unit)) if self._epochs[unit] > 1 else (),
            suspects=self._suspicions.of(unit),
            lone_worker=len({a.worker for a in self._attempts.values()}) == 1,
        )

    def committed(
        self, attempt: int, unit: int, epoch: int, summary: UnitSummary, now: float
    ) -> None:
        """Count a unit as done, unless its sender was given up."""
        if _Owner(attempt, epoch) not in (self._open.get(unit), self._taken_back.get(unit)):
            self._num_dropped += 1
            return
        state = self._attempts[attempt]
        state.num_committed_units += 1
        state.report = state.report._replace(
            num_uncommitted=max(0, state.report.num_uncommitted - summary.num_outputs),
            faults=tuple(f for f in state.report.faults if f.unit != unit),
        )
        self._finish(unit, summary.num_failed)

    def give_back(self, attempt: int, unit: int, epoch: int, now: float) -> None:
        """Have another worker own a unit; its owner has journaled what it knows and leaves."""
        if self._open.get(unit) != _Owner(attempt, epoch):
            self._num_dropped += 1
            return
        self._disown(unit)
        self._balance.give_back([unit])

    def report(self, attempt: int, report: WorkerReport, now: float) -> Directions:
        """Take a worker's progress; totals are cumulative, so a lost report loses nothing."""
        state = self._attempts.get(attempt)
        if state is None or not state.live:
            self._num_dropped += 1
            return Directions(drain=True)
        status = status_of(report, state.report)
        state.report = self._without_lost_units(attempt, report)
        if self._rate.wants(now):
            self._rate.add(now, num_tokens(self._attempts.values()))
        self._judge()
        orders = self._balance.report(attempt, status, now)
        for unit in self._balance.take_back(now):
            owner = self._taken_back[unit] = self._disown(unit)
            former = self._attempts[owner.attempt]
            former.report = former.report._replace(num_uncommitted=0, faults=())
        return self._directions(state, Orders() if self._is_ending_all else orders, now)

    # What the driver says

    def worker_lost(self, attempt: int, committed: Collection[int], now: float) -> None:
        """Give up an incarnation: its open units wait for a new owner.

        `committed` are units whose files exist: those need nobody, even if word of them was lost.
        The rows that were in its engine are suspects, unless it was told to leave.
        """
        state = self._attempts.get(attempt)
        if state is None:
            self._never_registered.add(attempt)
        if state is None or not state.live:
            return
        state.live = False
        former = {u for u, owner in self._taken_back.items() if owner.attempt == attempt}
        for unit in (state.units | former).intersection(committed):
            self._finish(unit)
        if not self._is_ending(state):
            rows = ((r.unit, (r.row_id, r.sample_index)) for r in state.report.rows if r.live)
            self._suspicions.blame(
                End(state.worker, attempt), (r for r in rows if not self._counts.is_done(r[0]))
            )
        state.report = state.report._replace(
            num_uncommitted=0, faults=(), rows=(), refused=(), owned=()
        )
        for unit in list(state.units):
            self._disown(unit)
        for unit in former:
            self._taken_back.pop(unit, None)
        self._balance.lose(attempt)

    def drain(self) -> None:
        """Lease nothing more; every worker is told to end."""
        self._draining = True

    def dismiss(self, attempt: int) -> None:
        """Have one worker end in order, because its machine goes away; others take what it has.

        The answer to its next report says where its rows go on.
        """
        state = self._attempts.get(attempt)
        if state is not None and state.live and not state.leaving:
            state.leaving = True
            self._balance.dismiss(attempt)

    def stuck(self, now: float, no_progress_seconds: float) -> list[int]:
        """Live attempts that have rows and have made no step for longer than this."""
        return self._balance.stuck(now, no_progress_seconds)

    def attempts(self) -> list[AttemptRecord]:
        """Every incarnation so far, in order of attempt."""
        views = self._balance.workers()
        return [state.record(views.get(number)) for number, state in sorted(self._attempts.items())]

    def progress(self, now: float) -> Progress:
        """A snapshot of the whole job."""
        return progress_of(
            self._attempts.values(),
            self._counts,
            elapsed_seconds=0.0 if self._started is None else now - self._started,
            tokens_per_second=self._rate.per_second(),
            eta=self._balance.eta(now),
            failure=self._breaker.failure,
        )

    # What follows

    @property
    def _is_ending_all(self) -> bool:
        """Whether every attempt is told to end."""
        return self._draining or self._breaker.failure is not None

    def _is_ending(self, state: Attempt) -> bool:
        """Whether an attempt is told to end."""
        return state.leaving or self._is_ending_all

    def _works(self, state: Attempt) -> bool:
        return state.live and not self._is_ending(state)

    def _disown(self, unit: int) -> _Owner:
        """The unit has no owner any more; who it was."""
        owner = self._open.pop(unit)
        self._attempts[owner.attempt].units.discard(unit)
        return owner

    def _held(self, unit: int) -> Iterator[Held]:
        """The rows of a unit that its new owner need not decode: somebody else has them."""
        moved = self._moved.pop(unit, {})
        former = self._taken_back.get(unit)
        for attempt, state in self._attempts.items():
            if state.live and (former is None or attempt != former.attempt):
                for row in state.report.rows:
                    if row.unit == unit:
                        moved.pop((row.row_id, row.sample_index), None)
                        yield Held(row.row_id, row.sample_index, attempt)
        for key, to in moved.items():
            if self._lives(to):
                yield Held(*key, to)

    def _finish(self, unit: int, num_failed: int = 0) -> None:
        if unit in self._open:
            self._disown(unit)
        self._taken_back.pop(unit, None)
        self._moved.pop(unit, None)
        self._balance.finish(unit)
        self._counts.finish(unit, num_failed)
        self._breaker.committed(self._counts.outputs([unit]) - num_failed)
        self._suspicions.forget(unit)

    def _judge(self) -> None:
        if self._breaker.is_decided:
            return
        reports = [state.report for state in self._attempts.values() if state.live]
        num_open = sum(report.num_uncommitted for report in reports)
        self._breaker.judge(
            num_open,
            [fault for report in reports for fault in report.faults],
            all_terminal=self._counts.num_committed + num_open >= self._counts.num_outputs,
        )

    def _directions(self, state: Attempt, orders: Orders, now: float) -> Directions:
        report = state.report
        units = {(row.unit, row.epoch) for row in report.rows}
        units.update((owned.unit, owned.epoch) for owned in report.owned)
        refused = [(row, self._balance.other_worker(row.by)) for row in report.refused]
        retries = (RowMove(r.unit, (r.row_id, r.sample_index), to) for r, to in refused if to)
        orders = orders._replace(moves=(*orders.moves, *retries))
        if state.leaving:
            for unit, key, to in orders.moves:
                self._moved.setdefault(unit, {})[key] = to
        sick = self._balance.sick(now)
        return Directions(
            drain=not self._works(state) or self._counts.is_complete,
            may_commit_faults=self._breaker.may_commit_faults,
            lost=tuple(a for a in report.away_at if a in sick or not self._lives(a)),
            owners=tuple(
                Ownership(unit, owner.epoch, owner.attempt)
                for unit, epoch in units
                if (owner := self._open.get(unit)) is not None and owner.epoch > epoch
            ),
            released=tuple({unit for unit, _ in units if self._counts.is_done(unit)}),
            hopeless=tuple(row for row, to in refused if not to),
            orders=orders,
        )

    def _without_lost_units(self, attempt: int, report: WorkerReport) -> WorkerReport:
        """A report without the outcomes of units that are the sender's no longer."""
        lost = [o for o in report.owned if self._open.get(o.unit) != _Owner(attempt, o.epoch)]
        if not lost:
            return report
        units = {owned.unit for owned in lost}
        num_lost = sum(owned.num_terminal for owned in lost)
        return report._replace(
            num_uncommitted=max(0, report.num_uncommitted - num_lost),
            faults=tuple(fault for fault in report.faults if fault.unit not in units),
        )

    def _lives(self, attempt: int) -> bool:
        state = self._attempts.get(attempt)
        return state is not None and state.live


def _kind(info: Mapping[str, Any]) -> str:
    """What makes two workers equally fast, as far as can be told."""
    return ", ".join(str(info.get(name, "")) for name in ("device", "dtype", "threads"))
