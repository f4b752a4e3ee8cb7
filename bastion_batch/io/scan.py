"""The one reading of the inputs at planning: the schema that fits them all, and where rows are."""

import logging
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import DataError
from bastion_batch.io.jsonl import JSON_TEXT, Shape, iter_lines, parse_line, schema_of
from bastion_batch.io.sources import InputFile, open_input

log = logging.getLogger(__name__)

MAX_SPAN_BYTES = 64 << 20
"""Most bytes of a text file that one worker streams as one span."""


class Span(NamedTuple):
    """A row group or a stretch of a text file: what one worker streams once."""

    file: int
    span: int
    rows: Sequence[int]
    """Number in the file of each row: the physical line's in text."""
    offsets: Sequence[int]
    """Byte of each line, or place of each row in its row group."""


class Scan(NamedTuple):
    """What one reading of all inputs finds."""

    schema: pa.Schema
    spans: tuple[Span, ...]
    num_rows: int


def scan(files: Sequence[InputFile], prompt: str | None) -> Scan:
    """Read every file once: the schema that fits them all, and where each row is.

    Raises:
        DataError: naming the file that cannot be read or differs, or if there is no row.
    """
    parquet = bool(files) and files[0].is_parquet
    found = _scan_parquet(files) if parquet else _scan_jsonl(files, prompt)
    if not found.num_rows:
        raise DataError(f"no rows: {', '.join(f.path for f in files[:8])} is empty")
    for file in (f for i, f in enumerate(files) if not any(s.file == i for s in found.spans)):
        log.warning("input %s holds no rows", file.path)
    return found


def _scan_parquet(files: Sequence[InputFile]) -> Scan:
    schema, spans, num_rows = None, [], 0
    for number, file in enumerate(files):
        metadata, own = _parquet_footer(file)
        schema = own if schema is None else schema
        _require_equal(schema, own, files[0], file)
        start = 0
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).num_rows
            if size:
                spans.append(Span(number, group, range(start, start + size), range(size)))
            start += size
        num_rows += start
    return Scan(schema or pa.schema([]), tuple(spans), num_rows)


def _parquet_footer(file: InputFile) -> tuple[pq.FileMetaData, pa.Schema]:
    if not file.num_bytes:
        raise DataError(f"input {file.path} is empty, not a Parquet file")
    try:
        with open_input(file) as opened, pq.ParquetFile(opened) as parquet:
            return parquet.metadata, plain_schema(parquet.schema_arrow)
    except pa.ArrowException as error:
        raise DataError(f"input {file.path} is not a Parquet file: {error}") from None


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without notes of the program that wrote it, which would be wrong in ours."""
    return pa.schema([_without_field_id(f) for f in schema])


def _without_field_id(field: pa.Field) -> pa.Field:
    kept = {k: v for k, v in (field.metadata or {}).items() if k != b"PARQUET:field_id"}
    return field.with_metadata(kept or None)


def _require_equal(one: pa.Schema, other: pa.Schema, first: InputFile, file: InputFile) -> None:
    if one.equals(other):
        return
    ours, theirs = (
        {f.name: f"{f.type}{'' if f.nullable else ' not null'}" for f in s} for s in (one, other)
    )
    differences = [
        f"{name}: {ours.get(name, 'absent')} in {first.name}, {theirs.get(name, 'absent')} in"
        f" {file.name}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    raise DataError(
        f"input {file.path} has another schema than {first.path}:"
        f" {'; '.join(differences) or 'the columns are in another order'}"
    )


def _scan_jsonl(files: Sequence[InputFile], prompt: str | None) -> Scan:
    columns: dict[str, Shape] = {}
    spans: list[Span] = []
    num_replaced = 0
    for number, file in enumerate(files):
        index = _SpanIndex(number)
        with open_input(file) as opened:
            for line in iter_lines(opened):
                row = parse_line(line)
                num_replaced += row.num_replaced
                for name, value in row.values.items():
                    columns.setdefault(name, Shape()).observe(value)
                index.add(line.number, line.offset, len(line.raw))
        spans += index.spans
    if num_replaced:
        log.warning("%d strings hold lone surrogates, which were replaced by U+FFFD", num_replaced)
    schema = schema_of(columns, prompt)
    _warn_about_text(schema, columns)
    _require_text(columns, prompt)
    return Scan(schema, tuple(spans), sum(len(s.rows) for s in spans))


def _warn_about_text(schema: pa.Schema, columns: dict[str, Shape]) -> None:
    for field in schema:
        if field.metadata and field.metadata.items() >= JSON_TEXT.items():
            kinds = ", ".join(sorted(columns[field.name].seen))
            log.warning(
                "column %r fits no single type (%s): its values are kept as JSON text",
                field.name,
                kinds,
            )


def _require_text(columns: dict[str, Shape], prompt: str | None) -> None:
    seen = columns[prompt].seen if prompt in columns else set()
    if seen and "string" not in seen:
        raise DataError(f"column {prompt!r} holds {', '.join(sorted(seen))}, not text")


class _SpanIndex:
    """Collects the rows of one text file, a new span at each `MAX_SPAN_BYTES`."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.spans: list[Span] = []
        self._rows = array("q")
        self._offsets = array("q")

    def add(self, row: int, offset: int, num_bytes: int) -> None:
        start = self.spans[-1].offsets[0] if self.spans else None
        if start is None or offset + num_bytes - start > MAX_SPAN_BYTES:
            self._rows, self._offsets = array("q"), array("q")
            self.spans.append(Span(self.file, len(self.spans), self._rows, self._offsets))
        self._rows.append(row)
        self._offsets.append(offset)
