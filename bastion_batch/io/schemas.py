"""The columns of `data/` and `steps/`: a contract with users, versioned by `SCHEMA_VERSION`."""

from collections import Counter
from typing import NamedTuple

import pyarrow as pa

from bastion_batch.config import OutputConfig
from bastion_batch.errors import DataError

SCHEMA_VERSION = 1
"""Raised when a column is added, removed, renamed or given another type or meaning."""

_OUR_COLUMNS = (
    ("row_id", pa.string()),
    ("sample_index", pa.int32()),
    ("output", pa.large_string()),
    ("finish_reason", pa.string()),
    ("error", pa.string()),
    ("error_kind", pa.string()),
    ("num_prompt_tokens", pa.int32()),
    ("num_output_tokens", pa.int32()),
    ("num_steps", pa.int32()),
    ("tokens_per_step", pa.float32()),
    ("output_token_ids", pa.list_(pa.int32())),
    ("worker", pa.string()),
    ("device", pa.string()),
    ("migrations", pa.int32()),
    ("dtype", pa.string()),
)

STEP_COLUMNS = (
    "batch_size",
    "budget_nodes",
    "prefill_tokens",
    "predicted_verify_seconds",
    "predicted_step_seconds",
    "prefill_seconds",
    "draft_seconds",
    "build_seconds",
    "verify_seconds",
    "commit_seconds",
    "other_seconds",
    "step_seconds",
)
"""Columns of `steps/` that are the same on each live row of a step."""

ROW_COLUMNS = (
    "context_length",
    "num_nodes",
    "tree_depth",
    "top1_depth",
    "num_accepted",
    "num_committed",
    "expected_tokens",
    "expected_tokens_raw",
)
"""Columns of `steps/` that say what the step did for one row."""

_FLOATS = ("expected_tokens", "expected_tokens_raw")

STEPS_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("sample_index", pa.int32()),
        ("unit", pa.int32()),
        ("worker", pa.string()),
        ("attempt", pa.int32()),
        ("device", pa.string()),
        ("method", pa.string()),
        ("step", pa.int64()),
        *((name, pa.float32() if name in _FLOATS else pa.int32()) for name in ROW_COLUMNS),
        *(
            (name, pa.float32() if name.endswith("_seconds") else pa.int32())
            for name in STEP_COLUMNS
        ),
    ]
)
"""One row per (step, live row)."""


class Carried(NamedTuple):
    """An input column and its name in `data/`."""

    source: str
    name: str


def our_columns(output: OutputConfig, *, mixed_dtype: bool = False) -> pa.Schema:
    """The columns that we add behind the input's; `dtype` where a job's workers may differ in it."""
    asked_for = {"output_token_ids": output.output_token_ids, "dtype": mixed_dtype}
    return pa.schema([c for c in _OUR_COLUMNS if asked_for.get(c[0], True)])


def carried_columns(
    input_schema: pa.Schema, output: OutputConfig, *, mixed_dtype: bool = False
) -> tuple[Carried, ...]:
    """The input columns that `data/` keeps, in order, under names that are not ours.

    Names that differ in case only collide too: Spark and DuckDB do not tell them apart.

    Raises:
        DataError: naming the columns that collide, and the ways out.
    """
    ours = {name.casefold() for name in our_columns(output, mixed_dtype=mixed_dtype).names}
    collisions = [name for name in input_schema.names if name.casefold() in ours]
    if output.on_collision == "error" and collisions:
        raise DataError(
            f"input columns {collisions} have names of output columns;"
            " rename them, or set output.on_collision to prefix or drop_input"
        )
    prefix = "input_" if output.on_collision == "prefix" else None
    carried = tuple(
        Carried(name, f"{prefix}{name}" if name in collisions else name)
        for name in input_schema.names
        if prefix or name not in collisions
    )
    _require_distinct([c.name for c in carried])
    return carried


def data_schema(
    input_schema: pa.Schema, output: OutputConfig, *, mixed_dtype: bool = False
) -> pa.Schema:
    """The schema of `data/`: the input's columns, then ours.

    Raises:
        DataError: as `carried_columns`.
    """
    carried = [
        input_schema.field(c.source).with_name(c.name)
        for c in carried_columns(input_schema, output, mixed_dtype=mixed_dtype)
    ]
    return pa.schema([*carried, *our_columns(output, mixed_dtype=mixed_dtype)])


def _require_distinct(names: list[str]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError(f"columns {twice} would occur twice in the output; rename them")
