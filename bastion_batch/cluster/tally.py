"""How far a job is and how fast it goes: sums over the reports of its workers."""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bastion_batch.cluster.messages import AttemptRecord, Progress, WorkerReport
from bastion_batch.records import EngineTotals, measured_speedup

RATE_WINDOW_SECONDS = 30.0
NO_REPORT = WorkerReport(EngineTotals(), 0, 0, 0)


@dataclass(slots=True)
class Attempt:
    """What is known of one incarnation of a worker."""

    worker: str
    number: int
    info: Mapping[str, Any]
    progressed_at: float
    """When its step count last rose, or it had nothing to decode."""
    live: bool = True
    leaving: bool = False
    """Whether it was told to end by itself."""
    report: WorkerReport = NO_REPORT
    units: set[int] = field(default_factory=set)
    num_committed_units: int = 0

    @property
    def record(self) -> AttemptRecord:
        """What others may know of it."""
        return AttemptRecord(
            worker=self.worker,
            attempt=self.number,
            live=self.live,
            info=self.info,
            counts=self.report.counts,
            num_units=self.num_committed_units,
            num_finished=self.report.num_finished,
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
        eta_seconds=_eta_seconds(attempts, units.num_outputs - num_done, tokens_per_second),
        failure=failure,
    )


def num_tokens(attempts: Collection[Attempt]) -> int:
    """Tokens committed to rows so far."""
    return sum(attempt.report.counts.num_committed for attempt in attempts)


def _eta_seconds(attempts: Collection[Attempt], num_left: int, rate: float | None) -> float | None:
    """The tokens that the outputs left will need, at the recent rate.

    Tokens of rows still in flight count as part of that need already met.
    """
    reports = [attempt.report for attempt in attempts]
    num_finished = sum(report.num_finished for report in reports)
    if not rate or not num_finished:
        return None
    finished_tokens = sum(report.num_finished_tokens for report in reports)
    in_flight_tokens = sum(
        a.report.counts.num_committed - a.report.num_finished_tokens for a in attempts if a.live
    )
    tokens_left = num_left * finished_tokens / num_finished - max(in_flight_tokens, 0)
    return max(tokens_left, 0.0) / rate


class Rate:
    """Tokens per second over a sliding window of cumulative counts."""

    def __init__(self, window_seconds: float = RATE_WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> None:
        """The count was this at this time."""
        if self._points and now - self._points[-1][0] < 0.5:
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
