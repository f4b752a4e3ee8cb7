"""Reading small Parquet files whole.

Not by `pyarrow.parquet.read_table`: that reads ahead in threads of its own, which may still hold
the file when it returns, and a process that ends at that moment is aborted instead.
"""

from collections.abc import Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(file: BinaryIO, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in an open file, or these columns of it."""
    with pq.ParquetFile(file) as parquet:
        return parquet.read(columns=None if columns is None else list(columns), use_threads=False)
