"""How far a job is and how fast it goes: what the reports of its workers come to."""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bastion_batch.cluster.messages import AttemptRecord, Progress, WorkerReport
from bastion_batch.core.orders import Eta, Running, Status, WorkerView
from bastion_batch.core.rates import RateSample
from bastion_batch.records import EngineTotals, measured_speedup

RATE_WINDOW_SECONDS = 30.0
RATE_STEP_SECONDS = 0.5
NO_REPORT = WorkerReport(EngineTotals(), 0, 0, 0)


@dataclass(slots=True)
class Attempt:
    """What is known of one incarnation of a worker."""

    worker: str
    number: int
    info: Mapping[str, Any]
    live: bool = True
    leaving: bool = False
    """Whether it was told to end by itself."""
    report: WorkerReport = NO_REPORT
    units: set[int] = field(default_factory=set)
    num_committed_units: int = 0

    def record(self, view: WorkerView | None) -> AttemptRecord:
        """What others may know of it."""
        return AttemptRecord(
            worker=self.worker,
            attempt=self.number,
            live=self.live,
            info=self.info,
            counts=self.report.counts,
            num_units=self.num_committed_units,
            num_finished=self.report.num_finished,
            view=view,
            num_running=sum(row.live for row in self.report.rows),
        )


class UnitCounts:
    """Units and outputs of a job: how many there are, and how many are committed."""

    def __init__(self, num_outputs: Sequence[int], done: Collection[int]) -> None:
        """Of units with so many outputs each, of which some are committed."""
        self._outputs = array("q", num_outputs)
        self._is_done = bytearray(len(num_outputs))
        self.num_outputs = sum(num_outputs)
        self.num_units = len(num_outputs)
        self.num_units_done = 0
        self.num_committed = 0
        self.num_failed = 0
        """Of the outputs that this invocation committed."""
        for unit in done:
            self.finish(unit)

    @property
    def is_complete(self) -> bool:
        """Whether every unit is committed."""
        return self.num_units_done == self.num_units

    def is_done(self, unit: int) -> bool:
        """Whether the unit is committed."""
        return bool(self._is_done[unit])

    def outputs(self, units: Iterable[int]) -> int:
        """How many outputs these units have."""
        return sum(self._outputs[unit] for unit in units)

    def finish(self, unit: int, num_failed: int = 0) -> None:
        """The unit is committed."""
        if not self._is_done[unit]:
            self._is_done[unit] = 1
            self.num_units_done += 1
            self.num_committed += self._outputs[unit]
            self.num_failed += num_failed


def progress_of(
    attempts: Collection[Attempt],
    units: UnitCounts,
    *,
    elapsed_seconds: float,
    tokens_per_second: float | None,
    eta: Eta | None,
    failure: str | None,
) -> Progress:
    """A snapshot of the whole job."""
    counts = EngineTotals()
    for attempt in attempts:
        counts = counts.plus(attempt.report.counts)
    num_done = units.num_committed + sum(a.report.num_uncommitted for a in attempts)
    return Progress(
        num_outputs=units.num_outputs,
        num_done=min(num_done, units.num_outputs),
        num_committed=units.num_committed,
        num_failed=units.num_failed,
        num_units=units.num_units,
        num_units_done=units.num_units_done,
        num_workers=sum(a.live for a in attempts),
        num_tokens=counts.num_committed,
        elapsed_seconds=elapsed_seconds,
        tokens_per_second=tokens_per_second,
        tokens_per_step=counts.tokens_per_step,
        mean_nodes=counts.mean_nodes,
        speedup=measured_speedup(a.report.counts for a in attempts),
        eta_seconds=None if eta is None else eta.seconds,
        tail_seconds=None if eta is None else eta.tail_seconds,
        failure=failure,
    )


def num_tokens(attempts: Collection[Attempt]) -> int:
    """Tokens committed to rows so far."""
    return sum(attempt.report.counts.num_committed for attempt in attempts)


def status_of(report: WorkerReport, before: WorkerReport) -> Status:
    """What the balance of the job needs of a report that follows another one."""
    return Status(
        running=[
            Running(r.unit, (r.row_id, r.sample_index), r.num_tokens, r.num_prompt_tokens, r.facts)
            for r in report.rows
            if r.facts is not None
        ],
        backlog=report.backlog,
        sample=_sample(report.counts, before.counts),
        lengths=report.lengths,
        num_steps=report.counts.num_steps,
    )


def _sample(now: EngineTotals, before: EngineTotals) -> RateSample | None:
    """How fast the steps between two reports went, or None if there were none."""
    num_steps = now.num_steps - before.num_steps
    if not num_steps:
        return None
    return RateSample(
        batch=(now.num_row_steps - before.num_row_steps) / num_steps,
        seconds=now.step_seconds - before.step_seconds,
        tokens=now.num_committed - before.num_committed,
        prefill_tokens=now.num_prefill_tokens - before.num_prefill_tokens,
    )


class Rate:
    """Tokens per second over a sliding window of cumulative counts."""

    def __init__(self, window_seconds: float = RATE_WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._points: deque[tuple[float, int]] = deque()

    def wants(self, now: float) -> bool:
        """Whether the last count is old enough for another one."""
        return not self._points or now - self._points[-1][0] >= RATE_STEP_SECONDS

    def add(self, now: float, total: int) -> None:
        """The count was this at this time."""
        if not self.wants(now):
            return
        self._points.append((now, total))
        while now - self._points[0][0] > self._window_seconds:
            self._points.popleft()

    def per_second(self) -> float | None:
        """The rate, or None before it can be told."""
        if len(self._points) < 2:
            return None
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first)
