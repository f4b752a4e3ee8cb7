"""Units: spans cut into what is committed as one file, and the names of the rows in them."""

import math
from array import array
from collections.abc import Iterable
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bastion_batch.io.spans import Span

_UNITS_PER_JOB = 64
_UNIT_OUTPUTS = range(4, 2049)
_UNITS_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("span", pa.int32()),
        ("row_start", pa.int64()),
        ("num_rows", pa.int64()),
        ("offset", pa.int64()),
    ]
)


class Unit(NamedTuple):
    """A contiguous range of rows of one span: what is committed as one file."""

    unit: int
    file: int
    span: int
    row_start: int
    """Number in the file of the first row."""
    num_rows: int
    offset: int
    """Byte of the first line (text), or place of the first row in its row group (Parquet)."""


def row_id(file: int, row: int) -> str:
    """The name of a row for the life of the job; names sort in input order."""
    return f"f{file:05d}-{row:012d}"


def rows_per_unit(unit_rows: int | str, num_outputs: int, samples: int) -> int:
    """Input rows of one unit; ``unit_rows`` counts output rows."""
    if isinstance(unit_rows, int):
        return max(1, unit_rows // samples)
    wanted = math.ceil(num_outputs / _UNITS_PER_JOB)
    return max(1, min(max(wanted, _UNIT_OUTPUTS[0]), _UNIT_OUTPUTS[-1]) // samples)


def cut_units(spans: Iterable[Span], max_rows: int) -> pa.Table:
    """The units: spans cut into even ranges of at most so many rows."""
    columns = tuple(array("q") for _ in _UNITS_SCHEMA)
    for span in spans:
        size = len(span.rows)
        pieces = math.ceil(size / max_rows)
        edges = [size * i // pieces for i in range(pieces + 1)]
        starts = edges[:-1]
        values = (
            repeat(span.file, pieces),
            repeat(span.span, pieces),
            (int(span.rows[start]) for start in starts),
            (end - start for start, end in pairwise(edges)),
            (int(span.offsets[start]) for start in starts),
        )
        for column, added in zip(columns, values, strict=True):
            column.extend(added)
    arrays = (
        np.frombuffer(column, np.int64).astype(field.type.to_pandas_dtype())
        for column, field in zip(columns, _UNITS_SCHEMA, strict=True)
    )
    return pa.table([pa.array(values) for values in arrays], schema=_UNITS_SCHEMA)
