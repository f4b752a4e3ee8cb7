"""Failed rows decoded again: which, what becomes of the others, and what a lost answer changes."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from fault_store import Fault, FaultStore
from io_jobs import completion, planned, read

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import commit_unit, read_footer, remove_orphan_steps
from bastion_batch.io.layout import data_name, steps_name
from bastion_batch.io.results import load_steps, read_totals
from bastion_batch.io.retries import NO_RETRIES
from bastion_batch.io.retry import choose
from bastion_batch.io.sinks import UnitBuilder
from bastion_batch.io.store import LocalStore
from bastion_batch.io.verify import verify
from bastion_batch.records import RowFault

FAILED = {2: "poison", 5: "poison", 6: "prompt_too_long"}
"""Rows that fail the first time, of ten."""


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def number(row_id):
    return int(row_id.rpartition("-")[2])


def finished(tmp_path, **changes):
    """Ten rows in two units, three of them failed."""
    plan = planned(
        tmp_path, output__unit_rows=5 * changes.get("decoding__samples_per_row", 1), **changes
    )
    for unit in range(plan.num_units):
        rows = read(plan, unit)
        builder = UnitBuilder(plan, unit, rows, worker="w1", attempt=1, device="cpu")
        for position, sample in list(builder.pending()):
            row_id = rows.row_ids[position]
            kind = FAILED.get(number(row_id)) if sample == 0 else None
            if kind:
                builder.add_fault(row_id, sample, RowFault(kind, "as told"), 7)
            else:
                builder.add(completion(row_id, sample))
        commit_unit(tmp_path / "out", plan, unit, 1, *builder.tables())
    return plan


def decode(store, plan, retry, unit, attempt=9):
    """As a worker does it."""
    opened = retry.open(store, plan, unit)
    rows = read(plan, unit)
    builder = UnitBuilder(opened.plan, unit, rows, "w9", attempt, "cuda", only=opened.again)
    pending = list(builder.pending())
    assert {(rows.row_ids[p], s) for p, s in pending} == opened.again
    for position, sample in pending:
        builder.add(completion(rows.row_ids[position], sample, text="at last"))
    assert builder.complete
    return opened.replace(store, attempt, *builder.tables())


def outcomes(output):
    rows = pq.read_table(output / "data").to_pylist()
    return [(number(r["row_id"]), r["sample_index"], r["output"], r["worker"]) for r in rows]


@pytest.mark.parametrize("samples", [1, 2])
def test_failed_rows_are_answered_and_the_others_stay(tmp_path, output, samples):
    plan = finished(tmp_path, decoding__samples_per_row=samples)
    before = {(n, s): (text, worker) for n, s, text, worker in outcomes(output)}
    retry = choose(output, plan)
    assert {unit: chosen.num_outputs for unit, chosen in retry.units.items()} == {0: 1, 1: 2}
    assert retry.num_outputs == 3
    assert retry.done(output, plan) == set()
    for unit in retry.units:
        assert decode(output, plan, retry, unit).won
    assert retry.done(output, plan) == {0, 1}
    for n, s, text, worker in outcomes(output):
        again = n in FAILED and s == 0
        assert (text, worker) == (("at last", "w9") if again else before[n, s])
    assert remove_orphan_steps(output, plan) == 2
    found = verify(output, plan, {"job_id": plan.job_id, "complete": False})
    assert found.clean
    assert found.num_unnamed_steps == 0
    steps = load_steps(output)
    assert steps.num_rows == 10 * samples * 3
    assert steps["row_id"].to_pylist() == sorted(steps["row_id"].to_pylist())


def test_only_some_kinds(tmp_path, output):
    plan = finished(tmp_path)
    retry = choose(output, plan, frozenset({"prompt_too_long"}))
    assert {unit: chosen.num_outputs for unit, chosen in retry.units.items()} == {1: 1}
    assert retry.done(output, plan) == {0}
    decode(output, plan, retry, 1)
    assert read_totals(output, plan).error_kinds == {"poison": 2}


def test_nothing_to_do(tmp_path, output):
    plan = finished(tmp_path)
    assert choose(output, plan, frozenset({"no such kind"})).units == {}


def test_an_incomplete_output_is_refused(tmp_path, output):
    plan = finished(tmp_path)
    (output / data_name(1)).unlink()
    with pytest.raises(OutputError, match="lacks 1 of 2 units: run the job to its end first"):
        choose(output, plan)


def test_a_unit_replaced_by_another_stays_as_that_one_left_it(tmp_path, output):
    plan = finished(tmp_path)
    retry = choose(output, plan)
    first, second = (decode(output, plan, retry, 0, attempt) for attempt in (9, 10))
    assert (first.won, second.won, second.attempt) == (True, False, 9)
    assert read_footer(output, data_name(0)).steps == (steps_name(0, 9),)
    assert not (output / steps_name(0, 10)).exists()


@pytest.mark.parametrize("fault", [Fault.ERROR_AFTER, Fault.ERROR_BEFORE])
def test_an_answer_that_is_lost_changes_nothing(tmp_path, output, fault):
    plan = finished(tmp_path)
    retry = choose(output, plan)
    faults = [fault]
    store = FaultStore(
        LocalStore(output, retries=NO_RETRIES),
        lambda op, name: faults.pop() if op == "replace_if" and faults else None,
    )
    try:
        commit = decode(store, plan, retry, 0)
    except OSError:
        commit = decode(store, plan, retry, 0)  # what the store's retries would do
    assert commit.won
    assert retry.done(output, plan) == {0}
    assert read_footer(output, data_name(0)).attempt == 9


def test_steps_are_recorded_as_the_unit_recorded_them(tmp_path, output):
    plan = finished(tmp_path, output__steps="off")
    retry = choose(output, plan)
    plan = replace(plan, steps="all")  # as this invocation says it
    assert decode(output, plan, retry, 0).won
    assert read_footer(output, data_name(0)).steps == ()
    assert list((output / "steps").iterdir()) == []
