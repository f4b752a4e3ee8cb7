"""The two tables of a unit, `data/` and `steps/`, collected from the outcomes of its requests."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import pyarrow as pa

from bastion_batch.io.jsonl import replace_surrogates
from bastion_batch.io.plan import Plan
from bastion_batch.io.reader import UnitRows
from bastion_batch.io.schemas import ROW_COLUMNS, STEP_COLUMNS, STEPS_SCHEMA, data_schema
from bastion_batch.records import Completion, RowFault, StepRecord

__all__ = ["STEPS_SCHEMA", "Tables", "UnitBuilder", "data_schema", "records_steps"]


class Tables(NamedTuple):
    """What one unit commits."""

    data: pa.Table
    steps: pa.Table | None
    """None when no steps are recorded."""


class _Outcome(NamedTuple):
    completion: Completion
    num_migrations: int


class _Step(NamedTuple):
    row_id: str
    sample_index: int
    record: StepRecord


class UnitBuilder:
    """Collects one outcome for each (row, sample) of a unit.

    Rows that could not be read are terminal from the start. A second outcome of the same sample
    changes nothing: messages may be delivered twice.
    """

    def __init__(
        self, plan: Plan, unit: int, rows: UnitRows, worker: str, attempt: int, device: str
    ) -> None:
        self._plan = plan
        self._unit = unit
        self._rows = rows
        self._worker = worker
        self._attempt = attempt
        self._device = device
        self._positions = {row_id: i for i, row_id in enumerate(rows.row_ids)}
        self._outcomes: dict[tuple[int, int], _Outcome] = {}
        for row_id, fault in zip(rows.row_ids, rows.faults, strict=True):
            if fault is not None:
                for sample in range(plan.samples_per_row):
                    self.add_fault(row_id, sample, fault)

    def pending(self) -> Iterator[tuple[int, int]]:
        """Yield (position in the unit, sample index) of what has no outcome yet."""
        return (key for key in self._keys() if key not in self._outcomes)

    def _keys(self) -> Iterator[tuple[int, int]]:
        samples = range(self._plan.samples_per_row)
        return ((i, s) for i in range(len(self._rows.row_ids)) for s in samples)

    @property
    def complete(self) -> bool:
        """Whether every sample of every row has its outcome."""
        return len(self._outcomes) == len(self._rows.row_ids) * self._plan.samples_per_row

    def add(self, completion: Completion, num_migrations: int = 0) -> None:
        """Take a completion of one of the unit's rows."""
        assert 0 <= completion.sample_index < self._plan.samples_per_row, completion.sample_index
        key = (self._positions[completion.row_id], completion.sample_index)
        self._outcomes.setdefault(key, _Outcome(_settled(completion), num_migrations))

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
        keys = list(self._keys())
        carried = self._rows.table.select(list(self._plan.carried))
        if self._plan.samples_per_row > 1:
            carried = carried.take(pa.array([position for position, _ in keys], pa.int64()))
        outcomes = [self._outcomes[key] for key in keys]
        schema = self._plan.data_schema
        ours = [schema.field(i) for i in range(carried.num_columns, len(schema))]
        values = [self._values(outcome) for outcome in outcomes]
        columns = [pa.array([v[f.name] for v in values], type=f.type) for f in ours]
        return pa.Table.from_arrays([*carried.columns, *columns], schema=schema)

    def _values(self, outcome: _Outcome) -> dict[str, Any]:
        done, fault = outcome.completion, outcome.completion.fault
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
            "worker": self._worker,
            "device": self._device,
            "migrations": outcome.num_migrations,
        }

    def _steps(self) -> pa.Table | None:
        if self._plan.steps == "off":
            return None
        steps = [
            _Step(done.row_id, done.sample_index, record)
            for done in (self._outcomes[key].completion for key in self._keys())
            if records_steps(self._plan.steps, done.row_id)
            for record in done.records
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
            "worker": [self._worker] * len(steps),
            "attempt": [self._attempt] * len(steps),
            "device": [self._device] * len(steps),
            "method": [record.method for record in records],
            "step": [timing.step for timing in timings],
            **{name: [getattr(r, name) for r in records] for name in ROW_COLUMNS},
            **{name: [getattr(t, name) for t in timings] for name in STEP_COLUMNS},
        }


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


def _utf8(text: str) -> str:
    """The text as Arrow can hold it."""
    return text if text.isascii() else replace_surrogates(text)
