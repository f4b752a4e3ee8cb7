"""Copies the rows of an output into few large files, in another place.

    DEST/data/part-00000.parquet       rows in order, under the plan's schema
    DEST/steps/part-00000.parquet      if asked for: the steps of those rows
    DEST/_bastion/compacted.json       written last: the copy is whole

Units are read one by one and a file is written when it is full, so memory holds one file however
large the output is. `data/` of the output is never touched.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import committed_units, data_name, read_footer
from bastion_batch.io.layout import DATA, PRIVATE, STEPS
from bastion_batch.io.local_store import LocalStore
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.plan import Plan
from bastion_batch.io.store import Output, Store, open_store

MARKER = f"{PRIVATE}/compacted.json"
FILE_BYTES = 256 * 2**20
ROW_GROUP_BYTES = 32 * 2**20


class Compaction(NamedTuple):
    """What was copied."""

    num_units: int
    num_rows: int
    files: tuple[str, ...]
    """Relative to the destination."""
    num_bytes: int


def compact(
    output: Output,
    destination: Output,
    plan: Plan,
    *,
    steps: bool = False,
    partial: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Compaction:
    """Copy what is committed; on any error nothing is left behind.

    Args:
        output: the output of the plan.
        destination: an empty or new directory or URL.
        plan: the output's.
        steps: copy the step records too.
        partial: copy what there is of a job that is not complete.
        file_bytes: files are cut when they are larger than this.

    Raises:
        OutputError: units are missing, or the destination holds files or lies in the output.
    """
    source, target = open_store(output), open_store(destination)
    units = sorted(committed_units(source).intersection(range(plan.num_units)))
    if len(units) < plan.num_units and not partial:
        raise OutputError(
            f"output {source.root} is not complete: {len(units)} of {plan.num_units} units; "
            "--partial copies what is there"
        )
    _require_empty(source, target)
    target.make_directories()
    data = _Parts(target, DATA, plan.data_schema, plan, file_bytes)
    records = _Parts(target, STEPS, plan.steps_schema, plan, file_bytes)
    try:
        for unit in units:
            _copy(source, unit, data, records if steps else None)
        parts = [part.close() for part in (data, *([records] if steps else []))]
        files = tuple(name for part in parts for name in part)
        summary = {"job_id": plan.job_id, "num_units": len(units), "num_rows": data.num_rows}
        complete = len(units) == plan.num_units
        target.put(MARKER, json.dumps({**summary, "complete": complete, "files": files}).encode())
    except BaseException:
        for name in (*data.names, *records.names, MARKER):
            target.remove(name)
        raise
    return Compaction(len(units), data.num_rows, files, data.num_bytes + records.num_bytes)


def _copy(source: Store, unit: int, data: "_Parts", records: "_Parts | None") -> None:
    name = data_name(unit)
    footer = read_footer(source, name)
    data.add(_read(source, name))
    if records is not None:
        for steps in footer.steps:
            records.add(_read(source, steps))


def _read(store: Store, name: str) -> pa.Table:
    try:
        with store.open(name) as file:
            return read_parquet(file)
    except (FileNotFoundError, pa.ArrowException) as error:
        raise OutputError(f"{store.root}/{name} cannot be read: {error!r}; see `verify`") from None


def _require_empty(source: Store, target: Store) -> None:
    if f"{target.root}/".startswith(f"{source.root}/"):
        raise OutputError(f"destination {target.root} lies in the output {source.root}")
    if any(_entries(target)):
        raise OutputError(f"destination {target.root} is not empty; give another one")


def _entries(target: Store) -> Iterator[object]:
    if isinstance(target, LocalStore):
        path = Path(target.root)
        if path.exists() and not path.is_dir():
            raise OutputError(f"destination {target.root} is not a directory")
        yield from path.iterdir() if path.exists() else ()
    else:
        for folder in (DATA, STEPS, PRIVATE):
            yield from target.names(folder)


class _Parts:
    """The files of one folder: row groups are filled from tables, files from row groups."""

    def __init__(
        self, store: Store, folder: str, schema: pa.Schema, plan: Plan, file_bytes: int
    ) -> None:
        footer = json.dumps({"job_id": plan.job_id, "compacted": True})
        self._schema = schema.with_metadata({**(schema.metadata or {}), "bastion_batch": footer})
        self._store = store
        self._folder = folder
        self._file_bytes = file_bytes
        self._waiting: list[pa.Table] = []
        self._sink: pa.BufferOutputStream | None = None
        self._writer: pq.ParquetWriter | None = None
        self.names: list[str] = []
        self.num_rows = 0
        self.num_bytes = 0

    def add(self, table: pa.Table) -> None:
        """Take the next rows."""
        if not table.schema.equals(self._schema):
            raise OutputError(f"{self._folder}/ has other columns than planned; see `verify`")
        self.num_rows += table.num_rows
        self._waiting.append(table.replace_schema_metadata(self._schema.metadata))
        if sum(t.nbytes for t in self._waiting) >= ROW_GROUP_BYTES:
            self._write_group()

    def close(self) -> list[str]:
        """Write what waits, and return the names of all files: one at least, for its schema."""
        self._write_group()
        if self._writer is not None or not self.names:
            self._write_file()
        return self.names

    def _write_group(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting.clear()
        self._open_writer().write_table(table, row_group_size=max(1, table.num_rows))
        assert self._sink is not None
        if self._sink.tell() >= self._file_bytes:
            self._write_file()

    def _open_writer(self) -> pq.ParquetWriter:
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = pq.ParquetWriter(self._sink, self._schema, compression="zstd")
        return self._writer

    def _write_file(self) -> None:
        self._open_writer().close()
        assert self._sink is not None
        payload = memoryview(self._sink.getvalue())
        name = f"{self._folder}/part-{len(self.names):05d}.parquet"
        self.names.append(name)
        self._store.put(name, payload)
        self.num_bytes += len(payload)
        self._writer = self._sink = None
