"""The one reading of the inputs at planning: the schema that fits them all, and where rows are.

Of Parquet the footers are read, many at once; of text every byte, though only lines of a new shape
are parsed. Memory grows with the number of text rows by 8 bytes each.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import DataError
from bastion_batch.io.jsonl import JSON_TEXT, ColumnTypes, Shape, schema_of
from bastion_batch.io.sources import InputFile, at_once, open_input, readable
from bastion_batch.io.spans import Span, TextSpans

log = logging.getLogger(__name__)


class Scan(NamedTuple):
    """What one reading of all inputs finds."""

    schema: pa.Schema
    spans: tuple[Span, ...]
    num_rows: int


def scan(
    files: Sequence[InputFile],
    prompt: str | None,
    storage_options: Mapping[str, Any] | None = None,
) -> Scan:
    """Read every file once: the schema that fits them all, and where each row is.

    Raises:
        DataError: naming the file that cannot be read or differs, or if there is no row.
    """
    parquet = bool(files) and files[0].is_parquet
    options = storage_options or {}
    found = _scan_parquet(files, options) if parquet else _scan_jsonl(files, prompt, options)
    if not found.num_rows:
        raise DataError(f"no rows: {', '.join(f.path for f in files[:8])} is empty")
    filled = {span.file for span in found.spans}
    for file in (f for i, f in enumerate(files) if i not in filled):
        log.warning("input %s holds no rows", file.path)
    return found


class _Footer(NamedTuple):
    """What planning needs of a Parquet file."""

    schema: pa.Schema
    group_rows: list[int]


def _scan_parquet(files: Sequence[InputFile], storage_options: Mapping[str, Any]) -> Scan:
    schema, spans, num_rows = pa.schema([]), [], 0
    footers = at_once(partial(_read_footer, storage_options=storage_options), files)
    for number, (file, footer) in enumerate(zip(files, footers, strict=True)):
        schema = footer.schema if number == 0 else schema
        _require_equal(schema, footer.schema, files[0], file)
        start = 0
        for group, size in enumerate(footer.group_rows):
            if size:
                spans.append(Span(number, group, range(start, start + size), range(size)))
            start += size
        num_rows += start
    return Scan(schema, tuple(spans), num_rows)


def _read_footer(file: InputFile, storage_options: Mapping[str, Any]) -> _Footer:
    if not file.num_bytes:
        raise DataError(f"input {file.path} is empty, not a Parquet file")
    try:
        with (
            readable(file.path),
            open_input(file, storage_options) as opened,
            pq.ParquetFile(opened.file) as parquet,
        ):
            metadata = parquet.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return _Footer(plain_schema(parquet.schema_arrow), sizes)
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


def _scan_jsonl(
    files: Sequence[InputFile], prompt: str | None, storage_options: Mapping[str, Any]
) -> Scan:
    # Compiles a loop: a wait that nobody but a planner of text should have.
    from bastion_batch.io.jsonl_index import index_lines

    types = ColumnTypes()
    spans: list[Span] = []
    for number, file in enumerate(files):
        found = TextSpans(number)
        with readable(file.path), open_input(file, storage_options) as opened:
            for lines in index_lines(opened.file):
                types.observe(lines)
                found.add(lines)
            opened.require_unchanged()
        spans += found.spans()
    schema = schema_of(types.columns, prompt)
    _warn_about_text(schema, types.columns)
    _require_text(types.columns, prompt)
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
