"""Who decodes what: leases of units, their owners and epochs, and the progress of the job.

A plain class: no Ray, no files, no clock (every call is told the time). It sees metadata only,
never a row, and its memory grows with the number of units, not with the data.

    pending --lease--> open (owner, epoch) --committed--> done
       ^                        |
       └------ worker_lost -----┘        the next owner's epoch is higher by one

A unit's file is the truth and this is bookkeeping: a unit committed twice is one file, and a
message that carries an epoch or an attempt no longer current is counted and dropped, because its
sender has been given up. Each attempt (one incarnation of a worker) has a number of its own.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bastion_batch.cluster.messages import (
    AttemptRecord,
    Done,
    Lease,
    LeaseReply,
    Progress,
    UnitSummary,
    Wait,
    WorkerReport,
)
from bastion_batch.cluster.runs import PendingUnits
from bastion_batch.records import EngineTotals, measured_speedup

MAX_OPEN_UNITS = 8
WAIT_SECONDS = 0.5
RATE_WINDOW_SECONDS = 30.0
_NO_REPORT = WorkerReport(EngineTotals(), 0, 0, 0)


class _Owner(NamedTuple):
    attempt: int
    epoch: int


@dataclass(slots=True)
class _Attempt:
    """What is known of one incarnation of a worker."""

    worker: str
    info: Mapping[str, Any]
    live: bool = True
    report: WorkerReport = _NO_REPORT
    units: set[int] = field(default_factory=set)
    num_committed_units: int = 0


class Coordinator:
    """Hands out the units of one job and keeps count. Not safe for threads: an actor's state."""

    def __init__(
        self,
        *,
        spans: Sequence[int],
        num_outputs: Sequence[int],
        done: Collection[int] = (),
        max_open_units: int = MAX_OPEN_UNITS,
    ) -> None:
        """Describe the units by span and number of outputs; those in `done` are committed."""
        self._num_outputs = array("q", num_outputs)
        self._epochs = array("l", bytes(array("l").itemsize * len(spans)))
        self._done = bytearray(len(spans))
        for unit in done:
            self._done[unit] = 1
        self._pending = PendingUnits(
            array("q", spans), (u for u in range(len(spans)) if not self._done[u])
        )
        self._open: dict[int, _Owner] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._never_registered: set[int] = set()
        self._max_open_units = max_open_units
        self._num_units_done = len(set(done))
        self._num_committed = sum(self._num_outputs[unit] for unit in done)
        self._num_failed = 0
        self._num_dropped = 0
        self._draining = False
        self._started: float | None = None
        self._rate = _Rate(RATE_WINDOW_SECONDS)

    @property
    def num_dropped(self) -> int:
        """Messages dropped because their sender had been given up."""
        return self._num_dropped

    def register(self, worker: str, attempt: int, info: Mapping[str, Any], now: float) -> None:
        """Admit an incarnation of a worker; its engine is loaded."""
        if self._started is None:
            self._started = now
        if attempt not in self._never_registered:
            self._attempts.setdefault(attempt, _Attempt(worker, info))

    def lease(self, attempt: int, now: float) -> LeaseReply:
        """Give this worker one more unit, or say why not."""
        state = self._attempts.get(attempt)
        if self._draining or state is None or not state.live:
            return Done(drained=True)
        if self._num_units_done == len(self._done):
            return Done(drained=False)
        if len(state.units) >= self._max_open_units and self._fills_engine(state):
            return Wait(WAIT_SECONDS)
        unit = self._pending.take(attempt)
        if unit is None:
            return Wait(WAIT_SECONDS)
        self._epochs[unit] += 1
        self._open[unit] = _Owner(attempt, self._epochs[unit])
        state.units.add(unit)
        return Lease(unit, self._epochs[unit])

    def committed(
        self, attempt: int, unit: int, epoch: int, summary: UnitSummary, now: float
    ) -> None:
        """Count a unit as done, unless its sender no longer owns it."""
        if self._open.get(unit) != _Owner(attempt, epoch):
            self._num_dropped += 1
            return
        self._num_failed += summary.num_failed
        self._attempts[attempt].num_committed_units += 1
        self._finish(unit)

    def report(self, attempt: int, report: WorkerReport, now: float) -> None:
        """Take a worker's progress; totals are cumulative, so a lost report loses nothing."""
        state = self._attempts.get(attempt)
        if state is None or not state.live:
            self._num_dropped += 1
            return
        state.report = report
        self._rate.add(now, self._num_tokens())

    def worker_lost(self, attempt: int, committed: Collection[int], now: float) -> None:
        """Give up an incarnation: its open units wait for a new owner.

        `committed` are units whose files exist: those need nobody, even if word of them was lost.
        """
        state = self._attempts.get(attempt)
        if state is None:
            self._never_registered.add(attempt)
        if state is None or not state.live:
            return
        state.live = False
        state.report = state.report._replace(num_uncommitted=0)
        for unit in state.units.intersection(committed):
            self._finish(unit)
        for unit in state.units:
            del self._open[unit]
        self._pending.put_back(state.units)
        self._pending.release(attempt)
        state.units.clear()

    def drain(self) -> None:
        """Lease nothing more; workers that ask are told to stop."""
        self._draining = True

    def attempts(self) -> list[AttemptRecord]:
        """Every incarnation so far, in order of attempt."""
        return [
            AttemptRecord(a.worker, n, a.live, a.info, a.report.counts, a.num_committed_units)
            for n, a in sorted(self._attempts.items())
        ]

    def progress(self, now: float) -> Progress:
        """A snapshot of the whole job."""
        counts = EngineTotals()
        for state in self._attempts.values():
            counts = counts.plus(state.report.counts)
        num_outputs = sum(self._num_outputs)
        num_done = self._num_committed + sum(
            state.report.num_uncommitted for state in self._attempts.values()
        )
        rate = self._rate.per_second()
        return Progress(
            num_outputs=num_outputs,
            num_done=min(num_done, num_outputs),
            num_committed=self._num_committed,
            num_failed=self._num_failed,
            num_units=len(self._done),
            num_units_done=self._num_units_done,
            num_workers=sum(state.live for state in self._attempts.values()),
            num_tokens=counts.num_committed,
            elapsed_seconds=0.0 if self._started is None else now - self._started,
            tokens_per_second=rate,
            tokens_per_step=counts.tokens_per_step,
            mean_nodes=counts.mean_nodes,
            speedup=measured_speedup(s.report.counts for s in self._attempts.values()),
            eta_seconds=self._eta_seconds(num_outputs - num_done, rate),
        )

    def _fills_engine(self, state: _Attempt) -> bool:
        """Whether a worker's open units, however small, could keep its whole batch busy."""
        num_open = sum(self._num_outputs[unit] for unit in state.units)
        return num_open >= state.info.get("max_batch", 0)

    def _finish(self, unit: int) -> None:
        owner = self._open.pop(unit)
        self._attempts[owner.attempt].units.discard(unit)
        self._done[unit] = 1
        self._num_units_done += 1
        self._num_committed += self._num_outputs[unit]

    def _num_tokens(self) -> int:
        return sum(state.report.counts.num_committed for state in self._attempts.values())

    def _eta_seconds(self, num_left: int, rate: float | None) -> float | None:
        """The tokens that the outputs left will need, at the recent rate.

        Tokens of rows still in flight count as part of that need already met.
        """
        reports = [state.report for state in self._attempts.values()]
        num_finished = sum(report.num_finished for report in reports)
        if not rate or not num_finished:
            return None
        finished_tokens = sum(report.num_finished_tokens for report in reports)
        in_flight_tokens = sum(
            state.report.counts.num_committed - state.report.num_finished_tokens
            for state in self._attempts.values()
            if state.live
        )
        tokens_left = num_left * finished_tokens / num_finished - max(in_flight_tokens, 0)
        return max(tokens_left, 0.0) / rate


class _Rate:
    """Tokens per second over a sliding window of cumulative counts."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> None:
        if self._points and now - self._points[-1][0] < 0.5:
            return
        self._points.append((now, total))
        while now - self._points[0][0] > self._window_seconds:
            self._points.popleft()

    def per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first)
