"""What one simulated worker knows, and what it reports of it: a worker of the product, without rows."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from bastion_batch.bench.simulation.machine import EPSILON, Machine
from bastion_batch.cluster.messages import InFlight, Owned, WorkerReport
from bastion_batch.core.lengths import LengthModel, LengthTally, RowFacts
from bastion_batch.core.orders import Orders
from bastion_batch.core.row_order import RowOrder
from bastion_batch.records import EngineTotals, RowKey


class RowInfo(NamedTuple):
    """A row of an open unit, as its workers know it."""

    unit: int
    key: RowKey
    num_prompt_tokens: int
    facts: RowFacts


@dataclass(slots=True)
class Opened:
    """A unit that a worker owns."""

    epoch: int
    num_rows: int
    num_left: int


@dataclass(slots=True, eq=False)
class WorkerSide:
    """One incarnation of a worker."""

    attempt: int
    machine: Machine
    rows: dict[int, RowInfo]
    """Of all workers' open units."""
    epochs: dict[int, int]
    """Of all open units, as their helpers know them too."""
    order: RowOrder = field(default_factory=RowOrder)
    tally: LengthTally = field(default_factory=LengthTally)
    model: LengthModel = field(default_factory=LengthModel)
    orders: Orders = field(default_factory=Orders)
    guests: deque[tuple[int, int]] = field(default_factory=deque)
    """Rows that were sent here and wait for a slot, with their tokens."""
    open: dict[int, Opened] = field(default_factory=dict)
    away: Counter[int] = field(default_factory=Counter)
    """Rows of its own units that other attempts have."""
    span: int | None = None
    unsafe: list[int] = field(default_factory=list)
    """Finished rows of its own units that are not journaled."""
    journaled_at: float = 0.0
    ask_again_at: float = 0.0
    leaves_at: float | None = None
    seen_seconds: float = 0.0
    step_seconds: float = 0.0
    """By its own clock."""
    num_finished: int = 0
    num_finished_tokens: int = 0

    def ended(self, row: int, num_tokens: int) -> None:
        """A row has ended in this engine."""
        facts = self.rows[row].facts
        self.num_finished += 1
        self.num_finished_tokens += num_tokens
        cut = num_tokens >= facts.max_new_tokens
        self.tally.add(facts, num_tokens, self.model, cut=cut)

    def report(self, now: float, clock_error: float) -> WorkerReport:
        """What it tells the coordinator; since the last one its clock erred by this factor."""
        in_engine = self._in_engine()
        live = ((row.facts, row.num_tokens) for row in in_engine if row.facts is not None)
        return WorkerReport(
            counts=self._totals(clock_error),
            num_uncommitted=sum(unit.num_rows - unit.num_left for unit in self.open.values()),
            num_finished=self.num_finished,
            num_finished_tokens=self.num_finished_tokens,
            rows=(*in_engine, *(self._in_flight(row, tokens) for row, tokens in self.guests)),
            away_at=tuple(attempt for attempt, count in self.away.items() if count),
            owned=tuple(
                Owned(number, unit.epoch, unit.num_rows - unit.num_left)
                for number, unit in self.open.items()
            ),
            backlog=self.order.backlog(),
            lengths=self.tally.sums(live, self.model, now),
        )

    def _in_engine(self) -> list[InFlight]:
        infos, epochs = self.rows, self.epochs
        virtual = self.machine.virtual + EPSILON
        found = []
        for row, there in self.machine.rows.items():
            unit, (row_id, sample), num_prompt_tokens, facts = infos[row]
            tokens = int(virtual - there.base)
            found.append(
                InFlight(row_id, sample, unit, epochs[unit], tokens, True, num_prompt_tokens, facts)
            )
        return found

    def _in_flight(self, row: int, num_tokens: int) -> InFlight:
        unit, key, num_prompt_tokens, facts = self.rows[row]
        return InFlight(*key, unit, self.epochs[unit], num_tokens, True, num_prompt_tokens, facts)

    def _totals(self, clock_error: float) -> EngineTotals:
        machine = self.machine
        self.step_seconds += (machine.busy_seconds - self.seen_seconds) * clock_error
        self.seen_seconds = machine.busy_seconds
        return EngineTotals(
            num_steps=int(machine.steps),
            num_row_steps=int(machine.row_steps),
            num_committed=int(machine.tokens),
            num_decoded=int(machine.tokens),
            num_prefill_tokens=int(machine.prefilled),
            step_seconds=self.step_seconds,
        )
