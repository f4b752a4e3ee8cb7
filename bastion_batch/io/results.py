"""What an output holds: totals, the proof that it is complete, and its step records.

Everything is recomputed from committed files, at any moment, during the job and after it.
"""

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bastion_batch.errors import JobFailedError, OutputError
from bastion_batch.io.commit import Footer, committed_footers, committed_units, data_name
from bastion_batch.io.plan import Plan
from bastion_batch.io.schemas import STEP_COLUMNS, STEPS_SCHEMA
from bastion_batch.io.store import DATA, LocalStore, Output, open_store
from bastion_batch.io.units import row_id

_STEP_KEY = ("worker", "attempt", "step")


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


def read_totals(output: Output, plan: Plan) -> Totals:
    """The totals of what is committed now."""
    store = open_store(output)
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    units = sorted(committed_units(store))
    counts = ("num_prompt_tokens", "num_output_tokens", "num_steps")
    for unit in units:
        table = _read(store, unit, [*counts, "finish_reason", "error_kind"])
        sums.update({name: sum(table[name].to_pylist()) for name in counts})
        sums["num_outputs"] += table.num_rows
        reasons.update(table["finish_reason"].to_pylist())
        kinds.update(kind for kind in table["error_kind"].to_pylist() if kind is not None)
    return Totals(
        num_units=len(units),
        num_outputs=sums["num_outputs"],
        num_failed=reasons["error"],
        finish_reasons=dict(reasons),
        error_kinds=dict(kinds),
        **{name: sums[name] for name in counts},
    )


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
    missing = set(range(plan.num_units)) - committed_units(store)
    if missing:
        raise JobFailedError(
            f"output {store.root} lacks {len(missing)} of {plan.num_units} units,"
            f" the first is {min(missing)}"
        )
    for footer in committed_footers(store):
        _prove_unit(store, plan, footer)


def _prove_unit(store: LocalStore, plan: Plan, footer: Footer) -> None:
    """Ids rise strictly inside the range of one unit; the ranges of units are disjoint."""
    unit = plan.unit(footer.unit)
    table = _read(store, unit.unit, ["row_id", "sample_index"])
    ids = list(zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    samples = plan.samples_per_row
    last = plan.unit(unit.unit + 1) if unit.unit + 1 < plan.num_units else None
    problems = {
        f"is of job {footer.job_id}, not {plan.job_id}": footer.job_id != plan.job_id,
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
    for problem, found in problems.items():
        if found:
            raise JobFailedError(f"{store.root}/{data_name(unit.unit)} {problem}")


def load_steps(output: Output, *, deduplicate: bool = False) -> pa.Table:
    """The step records of the units committed so far, in order of units.

    Files that no committed unit names do not count. With `deduplicate`, one row for each engine
    step, with the columns that all its rows share.

    Raises:
        OutputError: there is no such output, or a named file is missing.
    """
    store = open_store(output)
    if not (store.root / DATA).is_dir():
        raise OutputError(f"{store.root} is not an output: it has no {DATA}/")
    tables = [
        _read_steps(store, name) for footer in committed_footers(store) for name in footer.steps
    ]
    table = pa.concat_tables(tables) if tables else STEPS_SCHEMA.empty_table()
    return _one_per_step(table) if deduplicate else table


def _read_steps(store: LocalStore, name: str) -> pa.Table:
    try:
        with store.open(name) as file:
            return pq.read_table(file)
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


def _read(store: LocalStore, unit: int, columns: list[str]) -> pa.Table:
    with store.open(data_name(unit)) as file:
        return pq.read_table(file, columns=columns)
