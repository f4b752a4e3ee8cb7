import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from io_jobs import Target, answer, make_job, planned, run_all, run_unit, write_jsonl

from bastion_batch.errors import JobFailedError, OutputError
from bastion_batch.io.commit import commit_unit, data_name, steps_name
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import load_steps, prove_complete, read_totals
from bastion_batch.io.schemas import STEP_COLUMNS, STEPS_SCHEMA


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def test_totals_are_counted_from_the_files(tmp_path, output):
    lines = [{"prompt": "a"}, b"\xff", {"prompt": "b"}, b"{", {"prompt": "c"}]
    file = write_jsonl(tmp_path / "a.jsonl", lines)
    plan = open_plan(make_job(file, output, decoding__samples_per_row=2), Target())
    assert read_totals(output, plan).num_outputs == 0
    run_all(output, plan)
    assert read_totals(output, plan)._asdict() == {
        "num_units": plan.num_units,
        "num_outputs": 10,
        "num_failed": 4,
        "num_prompt_tokens": 6 * 7,
        "num_output_tokens": 6 * 5,
        "num_steps": 6 * 2,
        "finish_reasons": {"stop": 6, "error": 4},
        "error_kinds": {"invalid_utf8": 2, "invalid_json": 2},
    }
    prove_complete(output, plan)


def wrong(output, plan, change):
    """Commit all units, the second one wrongly."""
    for unit in range(plan.num_units):
        data, steps = answer(plan, unit)
        commit_unit(output, plan, unit, 1, change(data) if unit == 1 else data, steps)
    with pytest.raises(JobFailedError) as failed:
        prove_complete(output, plan)
    return str(failed.value)


def replaced(table, name, values):
    i = table.schema.get_field_index(name)
    return table.set_column(i, table.schema.field(i), pa.array(values, table.schema.field(i).type))


def test_a_missing_unit_is_named(tmp_path, output):
    plan = planned(tmp_path)
    run_unit(output, plan, 0)
    with pytest.raises(JobFailedError, match=f"lacks {plan.num_units - 1} of .* the first is 1"):
        prove_complete(output, plan)


def test_missing_rows_are_found(tmp_path, output):
    assert "has 2 rows, not 3 x 1" in wrong(output, planned(tmp_path), lambda t: t.slice(1))


def test_double_rows_are_found(tmp_path, output):
    def twice(table):
        return table.take([0, 0, 2])

    assert "twice or out of order" in wrong(output, planned(tmp_path), twice)


def test_rows_of_another_unit_are_found(tmp_path, output):
    def shifted(table):
        return replaced(table, "row_id", [f"f00000-{i:012d}" for i in (3, 4, 7)])

    assert "reaches into the next unit" in wrong(output, planned(tmp_path), shifted)

    def early(table):
        return replaced(table, "row_id", [f"f00000-{i:012d}" for i in (2, 4, 5)])

    other = tmp_path / "other"
    message = wrong(other / "out", planned(other), early)
    assert "begins with another row" in message


def test_other_samples_are_found(tmp_path, output):
    plan = planned(tmp_path, decoding__samples_per_row=2)
    message = wrong(output, plan, lambda t: replaced(t, "sample_index", [0, 1, 0, 2]))
    assert "other samples" in message


def test_files_of_another_job_or_no_unit_are_found(tmp_path, output):
    plan, other = planned(tmp_path), planned(tmp_path / "other")
    run_all(output, other)
    with pytest.raises(JobFailedError, match=f"is of job {other.job_id}, not {plan.job_id}"):
        prove_complete(output, plan)
    (output / "data" / "stray.parquet").touch()
    with pytest.raises(JobFailedError, match=r"holds data/stray\.parquet, no unit of the plan"):
        prove_complete(output, plan)


def test_steps_come_in_order_of_rows(tmp_path, output):
    plan = planned(tmp_path)
    for unit in reversed(range(plan.num_units)):
        run_unit(output, plan, unit)
    steps = load_steps(output)
    assert steps.schema == STEPS_SCHEMA
    assert steps["row_id"].to_pylist() == sorted(steps["row_id"].to_pylist())
    assert steps.num_rows == 10 * 3


def test_one_row_for_each_engine_step_on_request(tmp_path, output):
    plan = planned(tmp_path)
    for unit in range(plan.num_units):
        run_unit(output, plan, unit, attempt=unit % 2)
    steps = load_steps(output, deduplicate=True)
    assert steps.column_names == ["worker", "attempt", "step", "device", "method", *STEP_COLUMNS]
    keys = [(row["attempt"], row["step"], row["method"]) for row in steps.to_pylist()]
    expected = [(a, s, "bastion" if s else "prefill") for a in (0, 1) for s in (0, 1, 2)]
    assert sorted(keys) == expected
    assert set(steps["step_seconds"].to_pylist()) == {0.5}


def test_the_method_of_a_step_is_not_that_of_a_row_in_prefill(tmp_path, output):
    plan = planned(tmp_path, output__unit_rows=10)
    data, steps = answer(plan, 0)
    step = pa.array([0] * steps.num_rows, pa.int64())
    steps = steps.set_column(steps.schema.get_field_index("step"), "step", step)
    commit_unit(output, plan, 0, 1, data, steps)
    assert load_steps(output, deduplicate=True)["method"].to_pylist() == ["bastion"]


def test_a_named_steps_file_that_is_missing_is_an_error(tmp_path, output):
    plan = planned(tmp_path)
    run_unit(output, plan, 0)
    (output / steps_name(0, 1)).unlink()
    with pytest.raises(OutputError, match=r"u00000000-a1\.parquet is missing"):
        load_steps(output)


def test_what_is_no_output_has_no_steps(tmp_path):
    with pytest.raises(OutputError, match="is not an output"):
        load_steps(tmp_path)


def test_any_reader_gets_the_steps_of_a_complete_job(tmp_path, output):
    plan = planned(tmp_path)
    run_all(output, plan)
    assert pq.read_table(output / "steps").equals(load_steps(output))
    assert pq.read_schema(output / data_name(0)).equals(plan.data_schema)
