"""The two tables of a unit, `data/` and `steps/`, collected from the outcomes of its requests."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import pyarrow as pa

from bastion_batch.io.jsonl import replace_surrogates
from bastion_batch.io.plan import Plan
from bastion_batch.io.reader import UnitRows
from bastion_batch.io.schemas import ROW_COLUMNS, STEP_COLUMNS, STEPS_SCHEMA, data_schema
from bastion_batch.records import Completion, Outcome, RowFault, RowKey, StepRecord, Stretch

__all__ = ["STEPS_SCHEMA", "Tables", "UnitBuilder", "data_schema", "records_steps"]


class Tables(NamedTuple):
    """What one unit commits."""

    data: pa.Table
    steps: pa.Table | None
    """None when no steps are recorded."""


class _Step(NamedTuple):
    row_id: str
    sample_index: int
    record: StepRecord
    by: Stretch


class UnitBuilder:
    """Collects one outcome for each (row, sample) of a unit.

    Rows that could not be read are terminal from the start. A second outcome of the same sample
    changes nothing: messages may be delivered twice. With `only`, the unit is these samples.
    """

    def __init__(
        self,
        plan: Plan,
        unit: int,
        rows: UnitRows,
        worker: str,
        attempt: int,
        device: str,
        *,
        dtype: str | None = None,
        only: Collection[RowKey] | None = None,
    ) -> None:
        self._plan = plan
        self._unit = unit
        self._rows = rows
        self._worker = worker
        self._attempt = attempt
        self._device = device
        self._dtype = dtype
        self._positions = {row_id: i for i, row_id in enumerate(rows.row_ids)}
        self._keys = [
            (position, sample)
            for row_id, position in self._positions.items()
            for sample in range(plan.samples_per_row)
            if only is None or (row_id, sample) in only
        ]
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        for position, sample in self._keys:
            fault = rows.faults[position]
            if fault is not None:
                self.add_fault(rows.row_ids[position], sample, fault)

    def pending(self) -> Iterator[tuple[int, int]]:
        """Yield (position in the unit, sample index) of what has no outcome yet."""
        return (key for key in self._keys if key not in self._outcomes)

    def row_keys(self) -> list[RowKey]:
        """Every sample that the unit is, in order."""
        return [(self._rows.row_ids[position], sample) for position, sample in self._keys]

    @property
    def complete(self) -> bool:
        """Whether every sample has its outcome."""
        return len(self._outcomes) == len(self._keys)

    def add(
        self,
        completion: Completion,
        num_migrations: int = 0,
        stretches: Sequence[Stretch] = (),
    ) -> None:
        """Take a completion of one of the unit's rows.

        `stretches` say who made which of its records; without them this worker made all.
        """
        assert 0 <= completion.sample_index < self._plan.samples_per_row, completion.sample_index
        key = (self._positions[completion.row_id], completion.sample_index)
        num_records = len(completion.records)
        own = Stretch(self._worker, self._attempt, self._device, num_records, self._dtype)
        outcome = Outcome(
            completion=_settled(completion),
            stretches=tuple(stretches) or (own,),
            num_migrations=num_migrations,
        )
        self._outcomes.setdefault(key, outcome)

    def add_fault(
        self, row_id: str, sample_index: int, fault: RowFault, num_prompt_tokens: int = 0
    ) -> None:
        """Take a fault as the outcome of one sample of one of the unit's rows."""
        self.add(
            Completion(
                row_id=row_id,
                sample_index=sample_index,
                output_ids=(),
                text="",
                finish_reason="error",
                fault=fault,
                num_prompt_tokens=num_prompt_tokens,
                num_steps=0,
            )
        )

    def tables(self) -> Tables:
        """The unit's tables, sorted by (row_id, sample_index). Needs `complete`."""
        assert self.complete, f"unit {self._unit} has outcomes to come"
        return Tables(self._data(), self._steps())

    def _data(self) -> pa.Table:
        positions = [position for position, _ in self._keys]
        carried = self._rows.table.select(list(self._plan.carried))
        if positions != list(range(carried.num_rows)):
            carried = carried.take(pa.array(positions, pa.int64()))
        outcomes = [self._outcomes[key] for key in self._keys]
        schema = self._plan.data_schema
        ours = [schema.field(i) for i in range(carried.num_columns, len(schema))]
        values = [self._values(outcome) for outcome in outcomes]
        columns = [pa.array([v[f.name] for v in values], type=f.type) for f in ours]
        return pa.Table.from_arrays([*carried.columns, *columns], schema=schema)

    def _values(self, outcome: Outcome) -> dict[str, Any]:
        done, fault = outcome.completion, outcome.completion.fault
        ended_by = outcome.stretches[-1]
        return {
            "row_id": done.row_id,
            "sample_index": done.sample_index,
            "output": None if fault else _utf8(done.text),
            "finish_reason": done.finish_reason,
            "error": _utf8(fault.message) if fault else None,
            "error_kind": fault.kind if fault else None,
            "num_prompt_tokens": done.num_prompt_tokens,
            "num_output_tokens": done.num_output_tokens,
            "num_steps": done.num_steps,
            "tokens_per_step": done.tokens_per_step,
            "output_token_ids": None if fault else done.output_ids,
            "worker": ended_by.worker,
            "device": ended_by.device,
            "migrations": outcome.num_migrations,
            "dtype": dtypes_of(outcome.stretches),
        }

    def _steps(self) -> pa.Table | None:
        if self._plan.steps == "off":
            return None
        steps = [
            step
            for outcome in (self._outcomes[key] for key in self._keys)
            if records_steps(self._plan.steps, outcome.key[0])
            for step in _steps_of(outcome)
        ]
        values = self._step_values(steps)
        columns = [pa.array(values[f.name], type=f.type) for f in self._plan.steps_schema]
        return pa.Table.from_arrays(columns, schema=self._plan.steps_schema)

    def _step_values(self, steps: Sequence[_Step]) -> dict[str, Iterable[Any]]:
        records = [step.record for step in steps]
        timings = [record.timing for record in records]
        return {
            "row_id": [step.row_id for step in steps],
            "sample_index": [step.sample_index for step in steps],
            "unit": [self._unit] * len(steps),
            "worker": [step.by.worker for step in steps],
            "attempt": [step.by.attempt for step in steps],
            "device": [step.by.device for step in steps],
            "method": [record.method for record in records],
            "step": [timing.step for timing in timings],
            **{name: [getattr(r, name) for r in records] for name in ROW_COLUMNS},
            **{name: [getattr(t, name) for t in timings] for name in STEP_COLUMNS},
        }


def _steps_of(outcome: Outcome) -> Iterator[_Step]:
    """The records of an outcome, each with who made it; of a failed one there are none."""
    makers = (by for by in outcome.stretches for _ in range(by.num_records))
    for record, by in zip(outcome.completion.records, makers, strict=False):
        yield _Step(*outcome.key, record, by)


def records_steps(steps: str, row_id: str) -> bool:
    """Whether the steps of a row are recorded: of whole rows, the same ones every time."""
    kind, _, fraction = steps.partition(":")
    if kind != "sample":
        return kind == "all"
    point = int.from_bytes(blake2b(row_id.encode(), digest_size=8).digest(), "big")
    return point < float(fraction) * 2**64


def _settled(completion: Completion) -> Completion:
    """The completion; of a failed one only the fault and the prompt's size count."""
    assert (completion.finish_reason == "error") == (completion.fault is not None)
    if completion.fault is None:
        return completion
    return Completion(
        row_id=completion.row_id,
        sample_index=completion.sample_index,
        output_ids=(),
        text="",
        finish_reason="error",
        fault=completion.fault,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_steps=0,
    )


def dtypes_of(stretches: Sequence[Stretch]) -> str | None:
    """The dtypes that made a row, in order of their first step: nearly always one."""
    return "+".join(dict.fromkeys(s.dtype for s in stretches if s.dtype)) or None


def _utf8(text: str) -> str:
    """The text as Arrow can hold it."""
    return text if text.isascii() else replace_surrogates(text)
