"""The rows in a worker's engine, each with the unit it is of and what it entered with.

Here alone rows turn into requests and completions back into rows: whoever calls sees prefixes go
in, and outcomes, refusals or prefixes come out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from bastion_batch.cluster.engines import DecodingEngine
from bastion_batch.cluster.faults import REFUSALS
from bastion_batch.core.lengths import RowFacts
from bastion_batch.records import (
    Completion,
    Exported,
    Outcome,
    Prefix,
    RowFault,
    RowKey,
    Stretch,
)

STALLED_STEPS_PER_TOKEN = 4
STALLED_STEPS = 1_000
"""A row may wait for others to end, and its prompt takes steps too."""
MAX_STRIKES = 2


class Finished(NamedTuple):
    """A row has ended."""

    unit: int
    outcome: Outcome
    facts: RowFacts


class Refusal(NamedTuple):
    """This engine cannot go on with a row; another may."""

    unit: int
    row: Prefix
    fault: RowFault


class LiveRow(NamedTuple):
    """A row in the engine, or queued there."""

    unit: int
    row: Prefix
    """As it entered."""
    facts: RowFacts
    num_tokens: int
    """Output tokens now."""


@dataclass(slots=True)
class _Live:
    unit: int
    row: Prefix
    facts: RowFacts
    at: float
    step: int
    num_strikes: int = 0


class LiveRows:
    """What an engine holds, waiting rows included, in the order in which it was given."""

    def __init__(
        self, engine: DecodingEngine, worker: str, attempt: int, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._me = Stretch(worker, attempt, str(engine.info.device), 0, str(engine.info.dtype))
        self._clock = clock
        self._rows: dict[RowKey, _Live] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: RowKey) -> bool:
        return key in self._rows

    def rows(self) -> Iterator[LiveRow]:
        """Every row as it is now."""
        num_tokens = self._engine.num_tokens()
        for key, live in self._rows.items():
            yield LiveRow(live.unit, live.row, live.facts, num_tokens.get(key, live.row.num_tokens))

    def of_unit(self, unit: int) -> list[RowKey]:
        """The rows of one unit."""
        return [key for key, live in self._rows.items() if live.unit == unit]

    def add(self, unit: int, row: Prefix, facts: RowFacts) -> None:
        """Put a row into the engine, to go on after the tokens it has."""
        if row.stretches and row.stretches[-1].attempt != self._me.attempt:
            row = replace(row, num_migrations=row.num_migrations + 1)
        self._rows[row.key] = _Live(unit, row, facts, self._clock(), self._engine.totals.num_steps)
        self._engine.add(row.exported if row.num_tokens else row.exported.request)

    def step(self) -> list[Finished | Refusal]:
        """Decode one step; what became of the rows that left the engine in it."""
        return [self._take(completion) for completion in self._engine.step()]

    def export(self, key: RowKey) -> Prefix | None:
        """Take a row out with its tokens and their records; None if it is just ending."""
        try:
            exported = self._engine.export(*key)
        except ValueError:
            return None
        return self._prefix(self._rows.pop(key), exported)

    def drop(self, key: RowKey) -> None:
        """Take a row out if it is here: nobody needs it."""
        if key in self._rows:
            self.export(key)

    def drop_unit(self, unit: int) -> None:
        """Take out the rows of a unit."""
        for key in self.of_unit(unit):
            self.export(key)

    def stalled(self, no_progress_seconds: float) -> RowKey | None:
        """A row that gets no token although the engine makes steps, or None.

        A row that is overdue is taken out to see, and put in again behind the others; when it
        has still no new token as long after that, it is named.
        """
        now, step = self._clock(), self._engine.totals.num_steps
        for key, live in list(self._rows.items()):
            max_new_tokens = live.row.exported.request.sampling.max_new_tokens
            steps = STALLED_STEPS + STALLED_STEPS_PER_TOKEN * max_new_tokens
            if now - live.at <= no_progress_seconds or step - live.step <= steps:
                continue
            row = self.export(key)
            if row is None:
                continue
            strikes = 0 if row.num_tokens > live.row.num_tokens else live.num_strikes + 1
            self.add(live.unit, row, live.facts)
            if strikes == MAX_STRIKES:
                return key
            self._rows[key].num_strikes = strikes
        return None

    def _take(self, completion: Completion) -> Finished | Refusal:
        live = self._rows.pop((completion.row_id, completion.sample_index))
        if completion.fault is not None and completion.fault.kind in REFUSALS:
            request = replace(live.row.exported.request, generated_ids=completion.output_ids)
            exported = Exported(request, completion.records, completion.num_steps)
            return Refusal(live.unit, self._prefix(live, exported), completion.fault)
        outcome = Outcome(
            completion=completion,
            stretches=self._stretches(live, len(completion.records)),
            num_migrations=live.row.num_migrations,
        )
        return Finished(live.unit, outcome, live.facts)

    def _prefix(self, live: _Live, exported: Exported) -> Prefix:
        stretches = self._stretches(live, len(exported.records))
        return replace(
            live.row,
            exported=exported,
            stretches=stretches if stretches[-1].num_records else live.row.stretches,
        )

    def _stretches(self, live: _Live, num_records: int) -> tuple[Stretch, ...]:
        """Those of before, and this engine's."""
        before = live.row.stretches
        num_own = num_records - sum(stretch.num_records for stretch in before)
        return (*before, self._me._replace(num_records=num_own))
