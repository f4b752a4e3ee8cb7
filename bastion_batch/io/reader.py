"""Reading units in a worker: consecutive units of a span are one stream.

Every row of a unit comes exactly once, in order, under the plan's schema, whatever is wrong with
it. A file is checked to be the planned one at every open, and again behind each unit's rows: a unit
read while its file changed is not handed out.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import DataError
from bastion_batch.io.jsonl import Parsed, iter_lines, parse_line, to_table
from bastion_batch.io.plan import Plan
from bastion_batch.io.sources import open_input
from bastion_batch.io.units import Unit, row_id
from bastion_batch.records import RowFault

logger = logging.getLogger(__name__)

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
            OSError: storage does not answer.
        """
        where = self._plan.unit(unit)
        path = self._plan.inputs[where.file].path
        if self._stream is None or not self._stream.reaches(where):
            self.close()
            self._stream = self._open(where)
        rows = self._read(self._stream, where, path)
        if rows.table.num_rows != where.num_rows:
            raise DataError(
                f"input {path} has {rows.table.num_rows} of the {where.num_rows} rows planned from"
                f" row {where.row_start}"
            )
        return rows

    @staticmethod
    def _read(stream: "_TextStream | _GroupStream", where: Unit, path: str) -> UnitRows:
        """Rows of a file that did not change while they were read."""
        try:
            rows = stream.read(where)
        except (pa.ArrowException, OverflowError) as error:
            stream.input.require_unchanged()
            raise DataError(f"input {path} cannot be decoded as planned: {error}") from None
        except OSError:
            stream.input.require_unchanged()
            raise
        stream.input.require_unchanged()
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
        self._planned = plan.inputs[where.file]
        self.input = open_input(self._planned, plan.storage_options)

    def reaches(self, where: Unit) -> bool:
        return where.file == self._number

    def read(self, where: Unit) -> UnitRows:
        self._require_line(where.offset)
        lines = iter_lines(self.input.file, number=where.row_start, offset=where.offset)
        taken = list(islice(lines, where.num_rows))
        parsed = [parse_line(line) for line in taken]
        num_replaced = sum(row.num_replaced for row in parsed)
        if num_replaced:
            logger.warning(
                "input %s, rows from %d: %d strings hold lone surrogates, replaced by U+FFFD",
                self._planned.path,
                where.row_start,
                num_replaced,
            )
        values, faults = zip(*map(self._checked, parsed), strict=True)
        ids = [row_id(where.file, line.number) for line in taken]
        return UnitRows(ids, to_table(values, self._plan.input_schema), list(faults))

    def _require_line(self, offset: int) -> None:
        """A change that spares size, head and tail of a file may still move its lines."""
        if offset == 0:
            return
        self.input.file.seek(offset - 1)
        if self.input.file.read(1) != b"\n":
            raise DataError(
                f"input {self._planned.path} has changed since the job was planned: no line begins"
                f" at byte {offset}"
            )

    def _checked(self, row: Parsed) -> tuple[dict[str, Any], RowFault | None]:
        if row.fault:
            return {}, RowFault(row.fault.kind, f"{self._planned.name}: {row.fault.message}")
        name = self._plan.prompt_column
        prompt = row.values.get(name) if name else None
        if prompt is None or isinstance(prompt, str):
            return row.values, None
        kind = type(prompt).__name__
        return row.values, RowFault("invalid_prompt", f"column {name!r} holds {kind}, not text")

    def close(self) -> None:
        self.input.close()


class _GroupStream:
    """A Parquet file, whose row groups are decoded one at a time, each from its start onwards.

    The footer is read once for all of them.
    """

    def __init__(self, plan: Plan, where: Unit) -> None:
        self._plan = plan
        self._number = where.file
        self._planned = plan.inputs[where.file]
        self.input = open_input(self._planned, plan.storage_options)
        is_remote = "://" in self._planned.path  # fetch columns whole, not page by page
        self._parquet = pq.ParquetFile(self.input.file, pre_buffer=is_remote)
        self._begin(where.span)

    def _begin(self, group: int) -> None:
        self._group = group
        self._batches: Iterator[pa.RecordBatch] = self._parquet.iter_batches(
            batch_size=_BATCH_ROWS, row_groups=[group]
        )
        self._buffer: pa.RecordBatch | None = None
        self._position = 0

    def reaches(self, where: Unit) -> bool:
        return where.file == self._number

    def read(self, where: Unit) -> UnitRows:
        if where.span != self._group or where.offset < self._position:
            self._begin(where.span)
        for _ in self._take(where.offset - self._position):
            pass
        batches = list(self._take(where.num_rows))
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
        self.input.close()
