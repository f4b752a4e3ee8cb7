"""What a worker tells the coordinator: when, and how it stands."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bastion_batch.cluster.engines import DecodingEngine
from bastion_batch.cluster.exchange import Exchange
from bastion_batch.cluster.links import Link
from bastion_batch.cluster.live_rows import Finished
from bastion_batch.cluster.messages import Owned, WorkerReport
from bastion_batch.core.lengths import LengthSums, LengthTally, RowFacts
from bastion_batch.records import RowKey

REPORT_SECONDS = 1.0
ENTERING_REPORT_SECONDS = 0.1
"""Rows that enter the engine in an attempt's first seconds are reported sooner: what ended an
earlier attempt comes first, and may end this one."""
FIRST_SECONDS = 5.0
HELD_UP_SECONDS = 0.2
"""Between reports of a worker that can do nothing until what it says is known."""


class _Standing(NamedTuple):
    unit: int
    complete: bool
    num_parked: int


class Reporter:
    """Counts what has finished, and reports it with all that is open.

    Args:
        engine: the worker's.
        exchange: its units and rows.
        link: to the coordinator.
        clock: in seconds.
    """

    def __init__(
        self, engine: DecodingEngine, exchange: Exchange, link: Link, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._exchange = exchange
        self._link = link
        self._clock = clock
        self._started_at = clock()
        self._sent_at = 0.0
        self._told_standing: tuple[_Standing, ...] = ()
        self._lengths = LengthTally()
        self._told_lengths: LengthSums = {}
        self.num_finished = 0
        self._num_finished_tokens = 0

    def count(self, finished: Finished) -> None:
        """Take account of a row that has finished in the engine."""
        done = finished.outcome.completion
        self.num_finished += 1
        self._num_finished_tokens += done.num_output_tokens
        if done.fault is None:
            is_cut = done.finish_reason == "length"
            model = self._exchange.waiting.model
            self._lengths.add(finished.facts, done.num_output_tokens, model, cut=is_cut)

    @property
    def has_just_begun(self) -> bool:
        """Whether the engine has only run for seconds."""
        return self._clock() - self._started_at < FIRST_SECONDS

    def is_due(self, seconds: float) -> bool:
        """Whether the last report is so old; a worker held up by what it will say waits less."""
        age = self._clock() - self._sent_at
        is_held_up = not self._engine.has_work and self._standing() != self._told_standing
        return age >= seconds or (is_held_up and age >= HELD_UP_SECONDS)

    def send(self, rows: Collection[RowKey] | None = None) -> None:
        """Report; of the rows in flight, name these alone unless it is None."""
        self._sent_at = self._clock()
        self._told_standing = self._standing()
        report = self._report()
        if rows is not None:
            named = (row for row in report.rows if (row.row_id, row.sample_index) in rows)
            report = report._replace(rows=tuple(named))
        self._link.report(report)

    def _standing(self) -> tuple[_Standing, ...]:
        """What the coordinator must know of the open units before they can be done."""
        return tuple(
            _Standing(unit.number, unit.complete, len(unit.places.parked))
            for unit in self._exchange.open.values()
        )

    def _report(self) -> WorkerReport:
        exchange = self._exchange
        units = exchange.open.values()
        rows = tuple(exchange.in_flight())
        live = [(row.facts, row.num_tokens) for row in rows if row.live and row.facts]
        return WorkerReport(
            counts=self._engine.totals,
            num_uncommitted=sum(unit.num_terminal for unit in units),
            num_finished=self.num_finished,
            num_finished_tokens=self._num_finished_tokens,
            rows=rows,
            away_at=tuple({attempt for unit in units for attempt in unit.places.away.values()}),
            faults=tuple(fault for unit in units for fault in unit.faults()),
            refused=tuple(row for unit in units for row in unit.refused()),
            owned=tuple(Owned(u.number, u.lease.epoch, u.num_terminal) for u in units),
            backlog=exchange.waiting.backlog(),
            lengths=self._new_lengths(live),
        )

    def _new_lengths(self, live: Sequence[tuple[RowFacts, int]]) -> LengthSums:
        """What lengths come to; empty if the last report has said it."""
        sums = self._lengths.sums(live, self._exchange.waiting.model, self._clock())
        if sums is self._told_lengths:
            return {}
        self._told_lengths = sums
        return sums
