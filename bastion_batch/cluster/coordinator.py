"""Who decodes what: leases of units, their owners and epochs, rows in flight, faults, progress.

A plain class: no Ray, no files, no clock (every call is told the time). It sees metadata only,
never a row, and its memory grows with the number of units, not with the data.

    pending --lease--> open (owner, epoch) --committed--> done
       ^                        |
       └-- worker_lost, --------┘        the next owner's epoch is higher by one
           give_back

A unit's file is the truth and this is bookkeeping: a unit committed twice is one file, and a
message that carries an epoch or an attempt no longer current is counted and dropped, because its
sender has been given up. Each attempt (one incarnation of a worker) has a number of its own.

It calls nobody. A worker reports about once a second what it has, and the answer says what the
worker should know: who of its helpers is gone, who owns now the units whose rows it has, what to
move, whether to end. The answer follows from the report and from the state here, so that any
message may be lost: the next report is answered again. Any worker may die at any time; whoever
notices calls `worker_lost`, once or more often, before or after its last messages arrive.

The owner of a unit alone says where its rows are decoded: `move` only asks it to.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bastion_batch.cluster.faults import BREAKER_SUCCESSES, Breaker, Suspicions
from bastion_batch.cluster.messages import (
    AttemptRecord,
    Directions,
    Done,
    Held,
    Lease,
    LeaseReply,
    Move,
    Ownership,
    Progress,
    Refused,
    UnitSummary,
    Wait,
    WorkerReport,
)
from bastion_batch.cluster.runs import PendingUnits
from bastion_batch.cluster.tally import Attempt, Rate, UnitCounts, num_tokens, progress_of
from bastion_batch.records import End

MAX_OPEN_UNITS = 8
WAIT_SECONDS = 0.5


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
    ) -> None:
        """Describe the units by span and number of outputs; those in `done` are committed.

        Where faults are expected, because failed rows are decoded again, they stop nothing.
        """
        self._counts = UnitCounts(num_outputs, done)
        self._epochs = array("l", bytes(array("l").itemsize * len(spans)))
        self._pending = PendingUnits(
            array("q", spans), (u for u in range(len(spans)) if not self._counts.is_done(u))
        )
        self._open: dict[int, _Owner] = {}
        self._attempts: dict[int, Attempt] = {}
        self._never_registered: set[int] = set()
        self._moves: dict[int, list[Move]] = {}
        self._suspicions = Suspicions()
        num_succeeded = BREAKER_SUCCESSES if faults_expected else self._counts.num_committed
        self._breaker = Breaker(num_succeeded)
        self._max_open_units = max_open_units
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
        if attempt not in self._never_registered:
            self._attempts.setdefault(attempt, Attempt(worker, attempt, info, now))

    def lease(self, attempt: int, now: float) -> LeaseReply:
        """Give this worker one more unit, or say why not."""
        state = self._attempts.get(attempt)
        if state is None or not self._works(state):
            return Done(drained=True)
        if self._counts.num_units_done == self._counts.num_units:
            return Done(drained=False)
        if len(state.units) >= self._max_open_units and self._fills_engine(state):
            return Wait(WAIT_SECONDS)
        unit = self._pending.take(attempt)
        if unit is None:
            return Wait(WAIT_SECONDS)
        self._epochs[unit] += 1
        self._open[unit] = _Owner(attempt, self._epochs[unit])
        state.units.add(unit)
        return Lease(
            unit,
            self._epochs[unit],
            held=tuple(self._held(unit)),
            suspects=self._suspicions.of(unit),
            lone_worker=len({a.worker for a in self._attempts.values()}) == 1,
        )

    def committed(
        self, attempt: int, unit: int, epoch: int, summary: UnitSummary, now: float
    ) -> None:
        """Count a unit as done, unless its sender no longer owns it."""
        if self._open.get(unit) != _Owner(attempt, epoch):
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
        del self._open[unit]
        self._attempts[attempt].units.discard(unit)
        self._pending.put_back([unit])

    def report(self, attempt: int, report: WorkerReport, now: float) -> Directions:
        """Take a worker's progress; totals are cumulative, so a lost report loses nothing."""
        state = self._attempts.get(attempt)
        if state is None or not state.live:
            self._num_dropped += 1
            return Directions(drain=True)
        is_idle = not any(row.live for row in report.rows)
        if is_idle or report.counts.num_steps > state.report.counts.num_steps:
            state.progressed_at = now
        state.report = report
        self._rate.add(now, num_tokens(self._attempts.values()))
        self._judge()
        return self._directions(state)

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
        for unit in state.units.intersection(committed):
            self._finish(unit)
        if not self._is_ending(state):
            rows = ((r.unit, (r.row_id, r.sample_index)) for r in state.report.rows if r.live)
            self._suspicions.blame(
                End(state.worker, attempt), (r for r in rows if not self._counts.is_done(r[0]))
            )
        state.report = state.report._replace(num_uncommitted=0, faults=(), rows=(), refused=())
        for unit in state.units:
            del self._open[unit]
        self._pending.put_back(state.units)
        self._pending.release(attempt)
        state.units.clear()
        self._moves.pop(attempt, None)

    def drain(self) -> None:
        """Lease nothing more; every worker is told to end."""
        self._draining = True

    def dismiss(self, attempt: int) -> None:
        """Have one worker end in order, because its machine goes away; others take its units."""
        state = self._attempts.get(attempt)
        if state is not None:
            state.leaving = True
            self._pending.release(attempt)

    def move(self, unit: int, row_id: str, sample_index: int, to: int) -> bool:
        """Ask a unit's owner to have a row decoded by attempt `to`; false if that cannot be.

        The row goes there with the tokens it has. Nothing happens if it has ended meanwhile.
        """
        owner, target = self._open.get(unit), self._attempts.get(to)
        if owner is None or target is None or not self._works(target):
            return False
        self._moves.setdefault(owner.attempt, []).append(Move(unit, row_id, sample_index, to))
        return True

    def stuck(self, now: float, no_progress_seconds: float) -> list[int]:
        """Live attempts that have rows and have made no step for longer than this."""
        return [
            attempt
            for attempt, state in self._attempts.items()
            if state.live and now - state.progressed_at > no_progress_seconds
        ]

    def attempts(self) -> list[AttemptRecord]:
        """Every incarnation so far, in order of attempt."""
        return [state.record for _, state in sorted(self._attempts.items())]

    def progress(self, now: float) -> Progress:
        """A snapshot of the whole job."""
        return progress_of(
            self._attempts.values(),
            self._counts,
            elapsed_seconds=0.0 if self._started is None else now - self._started,
            tokens_per_second=self._rate.per_second(),
            failure=self._breaker.failure,
        )

    # What follows

    def _is_ending(self, state: Attempt) -> bool:
        """Whether an attempt is told to end."""
        return self._draining or state.leaving or self._breaker.failure is not None

    def _works(self, state: Attempt) -> bool:
        return state.live and not self._is_ending(state)

    def _fills_engine(self, state: Attempt) -> bool:
        """Whether what is left of a worker's open units could keep its whole batch busy.

        Of many units little may be left: each has its longest row, or waits for the breaker.
        """
        num_left = self._counts.outputs(state.units) - state.report.num_uncommitted
        return num_left >= state.info.get("max_batch", 0)

    def _held(self, unit: int) -> Iterator[Held]:
        for attempt, state in self._attempts.items():
            if state.live:
                for row in state.report.rows:
                    if row.unit == unit:
                        yield Held(row.row_id, row.sample_index, attempt)

    def _finish(self, unit: int, num_failed: int = 0) -> None:
        owner = self._open.pop(unit)
        self._attempts[owner.attempt].units.discard(unit)
        self._counts.finish(unit, num_failed)
        self._breaker.committed(self._counts.outputs([unit]) - num_failed)
        self._suspicions.forget(unit)

    def _judge(self) -> None:
        reports = [state.report for state in self._attempts.values() if state.live]
        num_open = sum(report.num_uncommitted for report in reports)
        self._breaker.judge(
            num_open,
            [fault for report in reports for fault in report.faults],
            all_terminal=self._counts.num_committed + num_open >= self._counts.num_outputs,
        )

    def _directions(self, state: Attempt) -> Directions:
        report = state.report
        units = {(row.unit, row.epoch) for row in report.rows}
        refused = [(row, self._other_worker(state.number, row)) for row in report.refused]
        return Directions(
            drain=not self._works(state),
            may_commit_faults=self._breaker.may_commit_faults,
            lost=tuple(a for a in report.away_at if not self._lives(a)),
            owners=tuple(
                Ownership(unit, owner.epoch, owner.attempt)
                for unit, epoch in units
                if (owner := self._open.get(unit)) is not None and owner.epoch > epoch
            ),
            released=tuple({unit for unit, _ in units if self._counts.is_done(unit)}),
            moves=(
                *self._moves.pop(state.number, ()),
                *(Move(r.unit, r.row_id, r.sample_index, to) for r, to in refused if to),
            ),
            hopeless=tuple(row for row, to in refused if not to),
        )

    def _lives(self, attempt: int) -> bool:
        state = self._attempts.get(attempt)
        return state is not None and state.live

    def _other_worker(self, owner: int, row: Refused) -> int | None:
        """The emptiest worker that has not refused a row, or None if all have."""
        candidates = [
            state
            for state in self._attempts.values()
            if self._works(state) and state.number not in row.by
        ]
        emptiest = min(candidates, key=lambda state: len(state.report.rows), default=None)
        return None if emptiest is None else emptiest.number
