"""`verify`: a clean output is clean, and each kind of damage is named and told from what is missing."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from io_jobs import Target as TinyTarget
from io_jobs import answer, make_job, planned, run_all, run_unit, write_jsonl

from bastion_batch.io.commit import commit_unit
from bastion_batch.io.layout import data_name, steps_name
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import read_totals
from bastion_batch.io.verify import described, verify
from bastion_batch.io.verify_unit import column_digest


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def record_of(output, plan):
    """As `run.json` says it of a complete job."""
    totals = json.loads(json.dumps(read_totals(output, plan)._asdict()))
    ended = {"invocation": 1, "status": "finished"}
    return {"job_id": plan.job_id, "complete": True, "totals": totals, "invocations": [ended]}


def finished(tmp_path, **changes):
    plan = planned(tmp_path, **changes)
    run_all(tmp_path / "out", plan)
    return plan, record_of(tmp_path / "out", plan)


def rewrite(output, unit, change):
    """Put a changed table under a unit's name, with the footer that was there."""
    path = output / data_name(unit)
    table = pq.read_table(path)
    metadata = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(metadata), path)


def with_column(table, name, values):
    position = table.schema.get_field_index(name)
    field = table.schema.field(position)
    return table.set_column(position, field, pa.array(values, field.type))


def problems(output, plan, record, **options):
    return [f"{p.file} {p.what}" for p in verify(output, plan, record, **options).problems]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decoding__samples_per_row": 3},
        {"output__steps": "off"},
        {"output__steps": "sample:0.5"},
        {"output__output_token_ids": True},
    ],
)
def test_a_finished_output_is_clean(tmp_path, output, changes, quick):
    plan, record = finished(tmp_path, **changes)
    found = verify(output, plan, record, quick=quick)
    assert found.problems == ()
    assert found.clean
    assert found.num_outputs == plan.num_outputs
    assert found.num_unnamed_steps == 0
    assert described(found).endswith("\nclean")


def test_parquet_inputs_with_nulls_and_nested_columns_are_clean(tmp_path, output):
    table = pa.table(
        {
            "prompt": ["a", None, "c", "d"] * 50,
            "score": pa.array([np.nan, 1.0, None, -0.0] * 50),
            "tags": pa.array([["x"], None, [], ["y", None]] * 50),
            "kind": pa.array(["k", "l", None, "k"] * 50).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=70)
    plan = open_plan(make_job(tmp_path / "in.parquet", output), TinyTarget())
    run_all(output, plan)
    assert problems(output, plan, record_of(output, plan)) == []


@pytest.mark.parametrize("quick", [False, True])
def test_an_unfinished_output_is_incomplete_and_not_wrong(tmp_path, output, quick):
    plan = planned(tmp_path)
    run_unit(output, plan, 0)
    run_unit(output, plan, 2)
    shutil.copy(output / steps_name(0, 1), output / steps_name(1, 7))  # an attempt is at work
    found = verify(output, plan, {"job_id": plan.job_id, "complete": False}, quick=quick)
    assert found.problems == ()
    assert not found.complete
    assert not found.clean
    assert found.first_missing == 1
    text = described(found)
    assert f"incomplete: {plan.num_units - 2} units are missing, the first is 1" in text
    assert "note" not in text


def test_nothing_is_committed_yet(tmp_path, output):
    plan = planned(tmp_path)
    found = verify(output, plan, None)
    assert (found.num_units, found.problems) == (0, ())


@pytest.mark.parametrize("quick", [False, True])
def test_files_that_are_no_units_are_named(tmp_path, output, quick):
    plan, record = finished(tmp_path)
    (output / "data" / "notes.txt").write_text("mine")
    shutil.copy(output / data_name(0), output / data_name(99))
    found = problems(output, plan, record, quick=quick)
    assert found == [
        "data/notes.txt is no unit of the plan",
        f"{data_name(99)} is no unit of the plan",
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_a_torn_file_is_named(tmp_path, output, quick):
    plan, record = finished(tmp_path)
    path = output / data_name(1)
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems(output, plan, record, quick=quick)
    assert problem.startswith(f"{data_name(1)} is not a unit of a job")


def test_pages_that_cannot_be_decoded_are_named(tmp_path, output):
    plan, record = finished(tmp_path)
    path = output / data_name(1)
    payload = bytearray(path.read_bytes())
    payload[4:200] = bytes(196)
    path.write_bytes(payload)
    (problem, *_) = problems(output, plan, record)
    assert problem.startswith(data_name(1))
    assert problems(output, plan, record, quick=True) == []


@pytest.mark.parametrize("quick", [False, True])
def test_a_unit_under_another_name_is_named(tmp_path, output, quick):
    plan, record = finished(tmp_path, output__unit_rows=5)
    shutil.copy(output / data_name(0), output / data_name(1))
    found = problems(output, plan, record, quick=quick)
    assert f"{data_name(1)} is unit 0, not 1" in found
    if not quick:
        assert any("begins with another row" in problem for problem in found)


@pytest.mark.parametrize("quick", [False, True])
def test_a_unit_of_another_job_is_named(tmp_path, output, quick):
    plan, record = finished(tmp_path)
    other = planned(tmp_path / "other")
    run_unit(tmp_path / "other" / "out", other, 0)
    shutil.copy(tmp_path / "other" / "out" / data_name(0), output / data_name(0))
    found = problems(output, plan, record, quick=quick)
    assert f"{data_name(0)} is of job {other.job_id}, not {plan.job_id}" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(1), "has 3 rows, not 4 x 1"),
        (lambda t: t.take([1, 0, 2, 3]), "has rows twice or out of order"),
        (lambda t: t.take([0, 1, 1, 3]), "has rows twice or out of order"),
        (lambda t: t.drop_columns(["device"]), "lacks ['device: string']"),
        (lambda t: with_column(t, "id", [7, 1, 2, 3]), "column 'id' differs from the input's"),
        (
            lambda t: with_column(t, "prompt", [None, "say 1", "say 2", "say 3"]),
            "column 'prompt' differs from the input's",
        ),
        (
            lambda t: with_column(t, "num_output_tokens", [5, 5, 4, 5]),
            "has 1 rows whose steps do not add up to their tokens: f00000-000000000002",
        ),
        (
            lambda t: with_column(t, "output", [None, "a", "b", "c"]),
            "has 1 rows whose outcome contradicts itself: f00000-000000000000",
        ),
        (
            lambda t: with_column(t, "finish_reason", ["stop", "error", "stop", "done"]),
            "has 2 rows whose outcome contradicts itself",
        ),
        (
            lambda t: with_column(t, "row_id", [None, *t["row_id"].to_pylist()[1:]]),
            "without a row_id",
        ),
    ],
)
def test_rows_that_are_not_what_they_should_be_are_named(tmp_path, output, change, message):
    plan, record = finished(tmp_path, num_rows=8, output__unit_rows=4)
    rewrite(output, 0, change)
    found = problems(output, plan, record)
    assert any(p.startswith(data_name(0)) and message in p for p in found), found
    assert not any(p.startswith(data_name(1)) for p in found)


@pytest.mark.parametrize("quick", [False, True])
def test_a_steps_file_that_is_missing_is_named(tmp_path, output, quick):
    plan, record = finished(tmp_path)
    (output / steps_name(0, 1)).unlink()
    found = problems(output, plan, record, quick=quick)
    assert found == [f"{data_name(0)} names {steps_name(0, 1)}, which is missing"]


def test_steps_that_are_lost_are_named(tmp_path, output):
    plan, record = finished(tmp_path)
    path = output / steps_name(0, 1)
    steps = pq.read_table(path)
    pq.write_table(steps.slice(3), path)
    (problem,) = problems(output, plan, record)
    assert "has 1 rows whose steps do not add up to their tokens" in problem
    pq.write_table(pa.concat_tables([steps, steps.slice(0, 1)]), path)
    assert len(problems(output, plan, record)) == 1
    pq.write_table(pq.read_table(output / steps_name(1, 1)), path)
    assert any("steps of rows that are not its own" in p for p in problems(output, plan, record))


def test_steps_may_be_off_for_some_invocations_only(tmp_path, output):
    plan = planned(tmp_path)
    run_unit(output, plan, 0)
    rest = open_plan(make_job(tmp_path / "in.jsonl", output, output__steps="off"), TinyTarget())
    for unit in range(1, plan.num_units):
        data, steps = answer(rest, unit)
        commit_unit(output, rest, unit, 9, data, steps)
    assert problems(output, plan, record_of(output, plan)) == []


def test_steps_that_no_unit_names_are_a_note(tmp_path, output):
    plan, record = finished(tmp_path)
    shutil.copy(output / steps_name(0, 1), output / steps_name(0, 7))
    found = verify(output, plan, record)
    assert found.clean
    assert "note: no unit names 1 of the files in steps/" in described(found)


def test_a_changed_input_is_named_once_and_the_rest_is_checked(tmp_path, output):
    plan, record = finished(tmp_path, output__unit_rows=5)
    rows = [{"prompt": f"say {i}", "id": i} for i in range(10)]
    rows[0]["id"] = 9
    write_jsonl(tmp_path / "in.jsonl", rows)
    rewrite(output, 1, lambda t: t.take([1, 0, 2, 3, 4]))
    found = problems(output, plan, record)
    assert sum(p.startswith(f"input {tmp_path}/in.jsonl has changed") for p in found) == 1
    assert any("out of order" in p for p in found)


def test_a_run_record_that_does_not_fit_is_named(tmp_path, output):
    plan, record = finished(tmp_path)
    assert problems(output, plan, None) == ["run.json is missing or damaged"]
    other = record | {"job_id": "x"}
    assert problems(output, plan, other) == [f"run.json is of job x, not {plan.job_id}"]
    wrong = record | {"totals": record["totals"] | {"num_output_tokens": 7}}
    assert problems(output, plan, wrong) == ["run.json says num_output_tokens 7, the files say 50"]
    assert problems(output, plan, wrong, quick=True) == []
    behind = wrong | {"invocations": [{"invocation": 2, "status": "interrupted"}]}
    assert problems(output, plan, behind) == []
    unproven = {"job_id": plan.job_id, "complete": False, "totals": None}
    assert problems(output, plan, unproven) == []


def test_a_digest_is_of_values_and_not_of_how_they_lie_in_memory():
    whole = pa.chunked_array([pa.array(["a", None, "c", "d"])])
    pieces = pa.chunked_array([pa.array(["x", "a", None])[1:], pa.array(["c", "d"])])
    assert column_digest(whole) == column_digest(pieces)
    for other in (["a", "", "c", "d"], ["a", None, "c"], ["a", None, "d", "c"]):
        assert column_digest(whole) != column_digest(pa.chunked_array([pa.array(other)]))
