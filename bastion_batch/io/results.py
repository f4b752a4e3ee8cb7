"""What an output holds: totals, the proof that it is complete, and its step records.

Everything is recomputed from committed files, at any moment, during the job and after it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from bastion_batch.errors import JobFailedError, OutputError
from bastion_batch.io.commit import (
    Footer,
    committed_footers,
    committed_units,
    data_name,
    read_footer,
)
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.plan import Plan
from bastion_batch.io.schemas import STEP_COLUMNS, STEPS_SCHEMA
from bastion_batch.io.store import DATA, PLAN, Output, Store, open_store
from bastion_batch.io.units import Unit, row_id

NUM_READERS = 8
"""Files read at once: what keeps an object store's answers from being waited for one by one."""

COUNTED = ("num_prompt_tokens", "num_output_tokens", "num_steps", "finish_reason", "error_kind")
"""Columns that totals are made of."""

_STEP_KEY = ("worker", "attempt", "step")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Totals(NamedTuple):
    """Counts over committed units; samples are counted as rows of their own."""

    num_units: int
    num_outputs: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    """Decode steps, each counted for every row that was live in it."""
    finish_reasons: dict[str, int]
    error_kinds: dict[str, int]

    @classmethod
    def of_unit(cls, table: pa.Table) -> "Totals":
        """The totals of one unit, from its columns in `COUNTED`."""
        reasons = Counter(table["finish_reason"].to_pylist())
        kinds = Counter(kind for kind in table["error_kind"].to_pylist() if kind is not None)
        return cls(
            num_units=1,
            num_outputs=table.num_rows,
            num_failed=reasons["error"],
            num_prompt_tokens=sum(table["num_prompt_tokens"].to_pylist()),
            num_output_tokens=sum(table["num_output_tokens"].to_pylist()),
            num_steps=sum(table["num_steps"].to_pylist()),
            finish_reasons=dict(reasons),
            error_kinds=dict(kinds),
        )

    @classmethod
    def summed(cls, parts: "Iterable[Totals]") -> "Totals":
        """The sum, field by field."""
        sums = [0] * 6
        reasons: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for part in parts:
            sums = [a + b for a, b in zip(sums, part[:6], strict=True)]
            reasons.update(part.finish_reasons)
            kinds.update(part.error_kinds)
        return cls(*sums, finish_reasons=dict(reasons), error_kinds=dict(kinds))


def read_totals(output: Output, plan: Plan, *, complete: bool = False) -> Totals:
    """The totals of what is committed now: of what is listed, or of all units if `complete`."""
    store = open_store(output)
    every = range(plan.num_units)
    units = every if complete else sorted(committed_units(store).intersection(every))
    return Totals.summed(
        in_threads(lambda unit: Totals.of_unit(_read(store, unit, list(COUNTED))), units)
    )


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield the function's result for each item, in order, several being computed at once."""
    pool = ThreadPoolExecutor(NUM_READERS)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


def prove_complete(output: Output, plan: Plan) -> None:
    """Prove from the files that every (row, sample) of the plan is there exactly once.

    Raises:
        JobFailedError: naming the first unit that is missing or wrong.
    """
    store = open_store(output)
    present = {name for name in store.names(DATA) if name.endswith(".parquet")}
    unknown = present - {data_name(unit) for unit in range(plan.num_units)}
    if unknown:
        raise JobFailedError(f"output {store.root} holds {sorted(unknown)[0]}, no unit of the plan")
    unlisted = set(range(plan.num_units)) - committed_units(store)
    missing = [unit for unit in unlisted if not store.exists(data_name(unit))]
    if missing:
        raise JobFailedError(
            f"output {store.root} lacks {len(missing)} of {plan.num_units} units,"
            f" the first is {min(missing)}"
        )
    for unit in range(plan.num_units):  # of the plan: a listing may be one of a moment ago
        _prove_unit(store, plan, read_footer(store, data_name(unit)))


def _prove_unit(store: Store, plan: Plan, footer: Footer) -> None:
    unit = plan.unit(footer.unit)
    table = _read(store, unit.unit, ["row_id", "sample_index"])
    ids = list(zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    problems = id_problems(plan, unit, ids)
    if footer.job_id != plan.job_id:
        problems.insert(0, f"is of job {footer.job_id}, not {plan.job_id}")
    if problems:
        raise JobFailedError(f"{store.root}/{data_name(unit.unit)} {problems[0]}")


def id_problems(plan: Plan, unit: Unit, ids: Sequence[tuple[str, int]]) -> list[str]:
    """What is wrong with the (row id, sample) pairs of a unit's file, as far as the plan tells.

    They rise strictly inside the range of one unit, and the ranges of units are disjoint.
    """
    samples = plan.samples_per_row
    last = plan.unit(unit.unit + 1) if unit.unit + 1 < plan.num_units else None
    problems = {
        f"has {len(ids)} rows, not {unit.num_rows} x {samples}": len(ids)
        != unit.num_rows * samples,
        "has rows twice or out of order": any(a >= b for a, b in pairwise(ids)),
        "has other samples than planned": [s for _, s in ids]
        != [*range(samples)] * (len(ids) // samples),
        "begins with another row": ids[:1] != [(row_id(unit.file, unit.row_start), 0)],
        "reaches into the next unit": last is not None
        and bool(ids)
        and ids[-1][0] >= row_id(last.file, last.row_start),
    }
    return [problem for problem, found in problems.items() if found]


def load_steps(output: Output, *, deduplicate: bool = False) -> pa.Table:
    """The step records of the units committed so far, in order of units.

    Files that no committed unit names do not count. With `deduplicate`, one row for each engine
    step, with the columns that all its rows share.

    Raises:
        OutputError: there is no such output, or a named file is missing.
    """
    store = open_store(output)
    if not store.exists(PLAN):
        raise OutputError(f"{store.root} is not an output: it has no {PLAN}")
    tables = [
        _read_steps(store, name) for footer in committed_footers(store) for name in footer.steps
    ]
    table = pa.concat_tables(tables) if tables else STEPS_SCHEMA.empty_table()
    return _one_per_step(table) if deduplicate else table


def _read_steps(store: Store, name: str) -> pa.Table:
    try:
        with store.open(name) as file:
            return read_parquet(file)
    except FileNotFoundError:
        raise OutputError(
            f"{store.root}/{name} is missing, but a committed unit names it"
        ) from None


def _one_per_step(steps: pa.Table) -> pa.Table:
    """Keep the shared columns; the method is the step's, which a prefill row does not tell."""
    is_prefill = pc.call_function("equal", [steps["method"], pa.scalar("prefill")])
    order = [(name, "ascending") for name in (*_STEP_KEY, "is_prefill")]
    ordered = steps.append_column("is_prefill", is_prefill).sort_by(order)
    shared = ("device", "method", *STEP_COLUMNS)
    first = ordered.group_by(list(_STEP_KEY), use_threads=False).aggregate(
        [(name, "first") for name in shared]
    )
    names = [re.sub("_first$", "", name) for name in first.column_names]
    return first.rename_columns(names).select([*_STEP_KEY, *shared])


def _read(store: Store, unit: int, columns: list[str]) -> pa.Table:
    with store.open(data_name(unit)) as file:
        return read_parquet(file, columns)
