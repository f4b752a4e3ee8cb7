"""Reading units in a worker: consecutive units of a span are one stream.

Every row of a unit comes exactly once, in order, under the plan's schema, whatever is wrong with
it. A file is checked to be the planned one at every open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import DataError
from bastion_batch.io.jsonl import Line, iter_lines, parse_line, to_table
from bastion_batch.io.plan import Plan
from bastion_batch.io.sources import open_input
from bastion_batch.io.units import Unit, row_id
from bastion_batch.records import RowFault

_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class UnitRows:
    """The rows of one unit as they were read."""

    row_ids: list[str]
    table: pa.Table
    """Under the plan's input schema."""
    faults: list[RowFault | None]
    """Why a row could not be read; its columns are then null."""

    def row(self, position: int) -> dict[str, Any]:
        """The columns of one row as Python values."""
        return self.table.slice(position, 1).to_pylist()[0]


class UnitReader:
    """Reads units of a plan, best in order: the open span is kept from one to the next.

    A context manager, which closes what is open.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stream: _TextStream | _GroupStream | None = None

    def read(self, unit: int) -> UnitRows:
        """The rows of one unit.

        Raises:
            DataError: naming an input that is gone, has changed, or cannot be decoded.
        """
        where = self._plan.unit(unit)
        if self._stream is None or not self._stream.reaches(where):
            self.close()
            self._stream = self._open(where)
        rows = self._stream.read(where)
        if rows.table.num_rows != where.num_rows:
            raise DataError(
                f"input {self._plan.inputs[where.file].path} has {rows.table.num_rows} of the"
                f" {where.num_rows} rows planned from row {where.row_start}"
            )
        return rows

    def _open(self, where: Unit) -> "_TextStream | _GroupStream":
        parquet = self._plan.inputs[where.file].is_parquet
        return (_GroupStream if parquet else _TextStream)(self._plan, where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _TextStream:
    """A JSONL file; units are found by their byte."""

    def __init__(self, plan: Plan, where: Unit) -> None:
        self._plan = plan
        self._number = where.file
        self._input = plan.inputs[where.file]
        self._file: BinaryIO = open_input(self._input)

    def reaches(self, where: Unit) -> bool:
        return where.file == self._number

    def read(self, where: Unit) -> UnitRows:
        lines = iter_lines(self._file, number=where.row_start, offset=where.offset)
        taken = list(islice(lines, where.num_rows))
        rows, faults = [], []
        for line in taken:
            values, fault = self._parse(line)
            rows.append(values)
            faults.append(fault)
        ids = [row_id(where.file, line.number) for line in taken]
        try:
            table = to_table(rows, self._plan.input_schema)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(
                f"input {self._input.path} no longer fits the planned columns: {error}"
            ) from None
        return UnitRows(ids, table, faults)

    def _parse(self, line: Line) -> tuple[dict[str, Any], RowFault | None]:
        row = parse_line(line)
        if row.fault:
            return {}, RowFault(row.fault.kind, f"{self._input.name}: {row.fault.message}")
        name = self._plan.prompt_column
        prompt = row.values.get(name) if name else None
        if prompt is None or isinstance(prompt, str):
            return row.values, None
        kind = type(prompt).__name__
        return row.values, RowFault("invalid_prompt", f"column {name!r} holds {kind}, not text")

    def close(self) -> None:
        self._file.close()


class _GroupStream:
    """A row group, decoded from its start onwards."""

    def __init__(self, plan: Plan, where: Unit) -> None:
        self._plan = plan
        self._where = where
        self._input = plan.inputs[where.file]
        self._file = open_input(self._input)
        self._parquet = pq.ParquetFile(self._file)
        self._batches: Iterator[pa.RecordBatch] = self._parquet.iter_batches(
            batch_size=_BATCH_ROWS, row_groups=[where.span]
        )
        self._buffer: pa.RecordBatch | None = None
        self._position = 0

    def reaches(self, where: Unit) -> bool:
        same = (where.file, where.span) == (self._where.file, self._where.span)
        return same and where.offset >= self._position

    def read(self, where: Unit) -> UnitRows:
        try:
            for _ in self._take(where.offset - self._position):
                pass
            batches = list(self._take(where.num_rows))
        except pa.ArrowException as error:
            raise DataError(f"input {self._input.path} cannot be decoded: {error}") from None
        columns = pa.Table.from_batches(batches).columns if batches else []
        table = pa.Table.from_arrays(columns, schema=self._plan.input_schema)
        ids = [row_id(where.file, where.row_start + i) for i in range(table.num_rows)]
        return UnitRows(ids, table, [None] * table.num_rows)

    def _take(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the next rows in pieces."""
        while num_rows:
            if self._buffer is None or not self._buffer.num_rows:
                self._buffer = next(self._batches, None)
                if self._buffer is None:
                    return
            piece = self._buffer.slice(0, num_rows)
            self._buffer = self._buffer.slice(piece.num_rows)
            self._position += piece.num_rows
            num_rows -= piece.num_rows
            yield piece

    def close(self) -> None:
        self._parquet.close()
        self._file.close()
