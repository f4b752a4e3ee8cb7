"""The journal's entries as an Arrow table, and back.

Step records lie flat, one column per field, so that a flush makes no Python object per record.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa

from bastion_batch.io.jsonl import replace_surrogates
from bastion_batch.records import (
    Completion,
    End,
    Exported,
    Outcome,
    Prefix,
    Request,
    RowFault,
    RowKey,
    StepRecord,
    StepTiming,
    Stretch,
)

_TYPES: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64()}


class Saved(NamedTuple):
    """A prefix without its request, which the owner of its unit makes again."""

    generated_ids: tuple[int, ...]
    records: tuple[StepRecord, ...]
    num_steps: int
    stretches: tuple[Stretch, ...]
    num_migrations: int

    @classmethod
    def of(cls, prefix: Prefix) -> "Saved":
        """What there is to keep of a prefix."""
        exported = prefix.exported
        return cls(
            generated_ids=exported.request.generated_ids,
            records=exported.records,
            num_steps=exported.num_steps,
            stretches=prefix.stretches,
            num_migrations=prefix.num_migrations,
        )

    def onto(self, request: Request) -> Prefix:
        """The request, with these tokens decided."""
        request = dataclasses.replace(request, generated_ids=self.generated_ids)
        return Prefix(
            exported=Exported(request, self.records, self.num_steps),
            stretches=self.stretches,
            num_migrations=self.num_migrations,
        )


class Entry(NamedTuple):
    """One thing that is known of one sample of a unit's row."""

    unit: int
    key: RowKey
    what: Outcome | Saved | frozenset[End]
    """How it ended, how far it is, or the engines that ended while it was in them."""


def _struct(kind: Any, *left_out: str) -> list[pa.Field]:  # noqa: ANN401 - a named tuple's class
    return [
        pa.field(name, _TYPES.get(hint, pa.string()))
        for name, hint in kind.__annotations__.items()
        if name not in left_out
    ]


_RECORD_FIELDS = _struct(StepRecord, "timing")
_TIMING_FIELDS = [field.with_name(f"timing_{field.name}") for field in _struct(StepTiming)]
_RECORD = pa.struct([*_RECORD_FIELDS, *_TIMING_FIELDS])

JOURNAL_SCHEMA = pa.schema(
    [
        ("unit", pa.int32()),
        ("row_id", pa.string()),
        ("sample_index", pa.int32()),
        ("kind", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("output_ids", pa.list_(pa.int32())),
        ("text", pa.large_string()),
        ("finish_reason", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("num_steps", pa.int32()),
        ("num_migrations", pa.int32()),
        ("records", pa.list_(_RECORD)),
        ("stretches", pa.list_(pa.struct(_struct(Stretch)))),
        ("ends", pa.list_(pa.struct(_struct(End)))),
    ]
)
"""One row per entry; `kind` is outcome, prefix or ends, and the others' columns are null."""


def to_table(entries: Collection[Entry]) -> pa.Table:
    """The entries under `JOURNAL_SCHEMA`."""
    rows = [_row(entry) for entry in entries]
    columns = {
        field.name: pa.array([row.get(field.name) for row in rows], field.type)
        for field in JOURNAL_SCHEMA
        if field.name != "records"
    }
    columns["records"] = _records_column([row.get("records", ()) for row in rows])
    return pa.table([columns[name] for name in JOURNAL_SCHEMA.names], schema=JOURNAL_SCHEMA)


def from_table(table: pa.Table) -> Iterator[Entry]:
    """The whole ones among the entries.

    Raises:
        ArrowException, KeyError, TypeError, ValueError: the table is not of this schema.
    """
    all_records = _records_of(table["records"].combine_chunks())
    rows = table.drop_columns(["records"]).to_pylist()
    for row, records in zip(rows, all_records, strict=True):
        entry = Entry(row["unit"], (row["row_id"], row["sample_index"]), _what(row, records))
        if _is_whole(entry.what):
            yield entry


def _row(entry: Entry) -> dict[str, Any]:
    row_id, sample_index = entry.key
    row = {"unit": entry.unit, "row_id": row_id, "sample_index": sample_index}
    match entry.what:
        case Outcome(completion=done) as outcome:
            return row | {
                "kind": "outcome",
                "num_prompt_tokens": done.num_prompt_tokens,
                "output_ids": done.output_ids,
                "text": done.text if done.text.isascii() else replace_surrogates(done.text),
                "finish_reason": done.finish_reason,
                "error_kind": done.fault and done.fault.kind,
                "error": done.fault and replace_surrogates(done.fault.message),
                "num_steps": done.num_steps,
                "num_migrations": outcome.num_migrations,
                "records": done.records,
                "stretches": [stretch._asdict() for stretch in outcome.stretches],
            }
        case Saved() as prefix:
            return row | {
                "kind": "prefix",
                "output_ids": prefix.generated_ids,
                "num_steps": prefix.num_steps,
                "num_migrations": prefix.num_migrations,
                "records": prefix.records,
                "stretches": [stretch._asdict() for stretch in prefix.stretches],
            }
        case ends:
            return row | {"kind": "ends", "ends": [end._asdict() for end in sorted(ends)]}


def _what(row: dict[str, Any], records: tuple[StepRecord, ...]) -> Outcome | Saved | frozenset[End]:
    if row["kind"] == "ends":
        return frozenset(End(**end) for end in row["ends"])
    stretches = tuple(Stretch(**stretch) for stretch in row["stretches"])
    if row["kind"] == "prefix":
        ids = tuple(row["output_ids"])
        return Saved(ids, records, row["num_steps"], stretches, row["num_migrations"])
    fault = RowFault(row["error_kind"], row["error"]) if row["error_kind"] else None
    completion = Completion(
        row_id=row["row_id"],
        sample_index=row["sample_index"],
        output_ids=tuple(row["output_ids"]),
        text=row["text"],
        finish_reason=row["finish_reason"],
        fault=fault,
        num_prompt_tokens=row["num_prompt_tokens"],
        num_steps=row["num_steps"],
        records=records,
    )
    return Outcome(completion=completion, stretches=stretches, num_migrations=row["num_migrations"])


def _is_whole(what: Outcome | Saved | frozenset[End]) -> bool:
    """Whether every token has its step record, and every record its worker."""
    match what:
        case Outcome(completion=done, stretches=stretches):
            if done.fault is not None:
                return True
            ids, records = done.output_ids, done.records
        case Saved(generated_ids=ids, records=records, stretches=stretches):
            pass
        case _:
            return True
    return len(ids) == sum(record.num_committed for record in records) and len(records) == sum(
        stretch.num_records for stretch in stretches
    )


def _records_column(records: Sequence[Sequence[StepRecord]]) -> pa.Array:
    flat = [record for of_row in records for record in of_row]
    timings = [record.timing for record in flat]
    names = [field.name for field in _RECORD_FIELDS]
    columns: list[Sequence[Any]] = [[getattr(record, name) for record in flat] for name in names]
    columns += zip(*timings, strict=True) if timings else [[] for _ in _TIMING_FIELDS]
    arrays = [
        pa.array(column, field.type)
        for column, field in zip(columns, [*_RECORD_FIELDS, *_TIMING_FIELDS], strict=True)
    ]
    offsets = [0, *accumulate(map(len, records))]
    values = pa.StructArray.from_arrays(arrays, fields=list(_RECORD))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _records_of(column: pa.ListArray) -> Iterator[tuple[StepRecord, ...]]:
    flat = column.flatten()
    columns = {field.name: flat.field(field.name).to_pylist() for field in _RECORD}
    timings = map(StepTiming, *(columns[field.name] for field in _TIMING_FIELDS))
    rest = (columns[field.name] for field in _RECORD_FIELDS)
    records = [StepRecord(*values) for values in zip(timings, *rest, strict=True)]
    start = 0
    for length in column.value_lengths().to_pylist():
        yield tuple(records[start : start + length])
        start += length
