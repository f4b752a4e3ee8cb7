"""Checks an output against its plan and its inputs, from the files alone; changes nothing.

Every file of `data/` must be a unit of the plan, whole; its rows those that the inputs hold, in
order, each sample once; its input columns the inputs' own, by a digest of each; its steps those of
its rows, adding up to their tokens. Units that are missing are no fault: a job may be running, or
stopped. What is wrong with the files that are there is, and each fault is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.commit import data_name
from bastion_batch.io.layout import DATA, STEPS, unit_of
from bastion_batch.io.plan import Plan
from bastion_batch.io.reader import UnitReader, UnitRows
from bastion_batch.io.results import Totals, in_threads
from bastion_batch.io.store import Output, Store, open_store
from bastion_batch.io.units import Unit
from bastion_batch.io.verify_unit import check_unit, read_unit, read_unit_footer


class Problem(NamedTuple):
    """One thing that is wrong."""

    file: str
    """Relative to the output; ``input`` for an input, which `what` names."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What an output was found to be."""

    root: str
    quick: bool
    """Whether only footers were read."""
    num_units: int
    num_units_planned: int
    num_outputs: int
    """Rows of the units that are there."""
    num_outputs_planned: int
    first_missing: int | None
    """The lowest unit that is not there."""
    problems: tuple[Problem, ...]
    num_unnamed_steps: int
    """Files of `steps/` that no unit names: an attempt that lost, or is at work, wrote them."""

    @property
    def complete(self) -> bool:
        """Whether every unit is there."""
        return self.first_missing is None

    @property
    def clean(self) -> bool:
        """Whether every unit is there and nothing is wrong."""
        return self.complete and not self.problems


def described(found: Verification) -> str:
    """The report: what was read, each problem, and the verdict."""
    read = "footers" if found.quick else "rows, steps and inputs"
    lines = [
        f"{found.root}: {found.num_units:,} of {found.num_units_planned:,} units, "
        f"{found.num_outputs:,} of {found.num_outputs_planned:,} rows; {read} were read"
    ]
    lines += [f"problem: {problem.file} {problem.what}" for problem in found.problems]
    if found.num_unnamed_steps and found.complete:
        lines.append(
            f"note: no unit names {found.num_unnamed_steps} of the files in {STEPS}/; "
            "the next `run` removes them"
        )
    return "\n".join([*lines, _verdict(found)])


def _verdict(found: Verification) -> str:
    if found.clean:
        return "clean"
    num_missing = found.num_units_planned - found.num_units
    missing = f"{num_missing:,} units are missing, the first is {found.first_missing}"
    if not found.problems:
        return f"incomplete: {missing}; nothing is wrong with what is there"
    problems = f"{len(found.problems)} problem" + "s" * (len(found.problems) > 1)
    return problems if found.complete else f"{problems}, and incomplete: {missing}"


class _Checked(NamedTuple):
    problems: list[Problem]
    steps: tuple[str, ...]
    num_outputs: int
    totals: Totals | None
    """None where only the footer was read, or the file cannot be."""


def verify(
    output: Output, plan: Plan, record: Mapping[str, Any] | None, *, quick: bool = False
) -> Verification:
    """Check an output.

    Args:
        output: may be that of a running job.
        plan: the output's; its inputs are read where it says.
        record: what `run.json` holds, if it can be read.
        quick: read footers only, neither rows nor steps nor inputs.

    Raises:
        OSError: storage failed, which says nothing about the output.
    """
    store = open_store(output)
    names = store.names(DATA)
    units = sorted(u for u in map(unit_of, names) if u is not None and u < plan.num_units)
    known = {data_name(unit) for unit in units}
    problems = [Problem(name, "is no unit of the plan") for name in names if name not in known]
    problems += _plan_problems(plan)
    checked = list(_checked(store, plan, units, quick))
    for each in checked:
        problems += each.problems
    missing = set(range(plan.num_units)).difference(units)
    if not missing:
        problems += _record_problems(plan, record, None if quick else _totals(checked))
    named = {name for each in checked for name in each.steps}
    return Verification(
        root=store.root,
        quick=quick,
        num_units=len(units),
        num_units_planned=plan.num_units,
        num_outputs=sum(each.num_outputs for each in checked),
        num_outputs_planned=plan.num_outputs,
        first_missing=min(missing, default=None),
        problems=tuple(dict.fromkeys(problems)),
        num_unnamed_steps=len(set(store.names(STEPS)) - named),
    )


def _plan_problems(plan: Plan) -> Iterator[Problem]:
    num_rows = sum(plan.units["num_rows"].to_pylist())
    if num_rows != plan.num_rows:
        what = f"plans {plan.num_rows} rows, but its units hold {num_rows}"
        yield Problem("_bastion/plan.json", what)


def _record_problems(
    plan: Plan, record: Mapping[str, Any] | None, totals: Totals | None
) -> Iterator[Problem]:
    """What a complete job's `run.json` says that its files do not. Until it is proven it is silent.

    `totals` are None where not every row could be, or was to be, counted.
    """
    if record is None:
        yield Problem("run.json", "is missing or damaged")
    elif record["job_id"] != plan.job_id:
        yield Problem("run.json", f"is of job {record['job_id']}, not {plan.job_id}")
    elif record["complete"] and totals is not None and not _is_behind(record):
        for name, value in totals._asdict().items():
            if record["totals"].get(name) != value:
                said = record["totals"].get(name)
                yield Problem("run.json", f"says {name} {said}, the files say {value}")


def _is_behind(record: Mapping[str, Any]) -> bool:
    """Whether an invocation that decoded failed rows again has not come to its end."""
    return bool(record["invocations"]) and record["invocations"][-1]["status"] != "finished"


def _totals(checked: list[_Checked]) -> Totals | None:
    parts = [each.totals for each in checked if each.totals is not None]
    return Totals.summed(parts) if len(parts) == len(checked) else None


def _checked(store: Store, plan: Plan, units: list[int], quick: bool) -> Iterator[_Checked]:
    """Check units, several spans at once: a span is streamed from its input once."""
    if quick:
        yield from in_threads(lambda unit: _check_footer(store, plan, plan.unit(unit)), units)
        return
    spans = [list(g) for _, g in groupby(map(plan.unit, units), lambda u: (u.file, u.span))]
    for span in in_threads(lambda span: _check_span(store, plan, span), spans):
        yield from span


def _check_span(store: Store, plan: Plan, units: list[Unit]) -> list[_Checked]:
    with UnitReader(plan) as reader:
        return [_check(store, plan, unit, _source(reader, plan, unit)) for unit in units]


def _source(reader: UnitReader, plan: Plan, unit: Unit) -> UnitRows | Problem:
    try:
        return reader.read(unit.unit)
    except DataError as error:
        return Problem("input", str(error).removeprefix("input "))


def _check(store: Store, plan: Plan, unit: Unit, source: UnitRows | Problem) -> _Checked:
    name = data_name(unit.unit)
    try:
        found = read_unit(store, name)
    except OutputError as error:
        return _Checked([Problem(name, str(error))], (), 0, None)
    rows = None if isinstance(source, Problem) else source
    problems = [Problem(name, what) for what in check_unit(store, plan, unit, found, rows)]
    if isinstance(source, Problem):
        problems.append(source)
    if problems and store.version(name) != found.version:
        return _check(store, plan, unit, source)  # it was replaced meanwhile, steps and all
    return _Checked(problems, found.footer.steps, found.footer.num_outputs, found.totals)


def _check_footer(store: Store, plan: Plan, unit: Unit) -> _Checked:
    name = data_name(unit.unit)
    try:
        found = read_unit_footer(store, name)
    except OutputError as error:
        return _Checked([Problem(name, str(error))], (), 0, None)
    problems = [Problem(name, what) for what in check_unit(store, plan, unit, found, None)]
    if problems and store.version(name) != found.version:
        return _check_footer(store, plan, unit)
    return _Checked(problems, found.footer.steps, found.footer.num_outputs, None)
