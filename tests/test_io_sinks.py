import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from io_jobs import Target, answer, completion, make_job, planned, read, write_jsonl

from bastion_batch.errors import DataError
from bastion_batch.io.planning import make_plan
from bastion_batch.io.schemas import STEPS_SCHEMA
from bastion_batch.io.sinks import UnitBuilder, records_steps
from bastion_batch.records import RowFault

CONTRACT = [
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
]


def builder_of(plan, unit=0):
    rows = read(plan, unit)
    return UnitBuilder(plan, unit, rows, worker="w1", attempt=9, device="cuda"), rows


def test_the_data_schema_is_the_contract(tmp_path):
    plan = planned(tmp_path, output__output_token_ids=True)
    theirs = [("prompt", pa.large_string()), ("id", pa.int64())]
    assert plan.data_schema.equals(pa.schema([*theirs, *CONTRACT]))


def test_token_ids_are_there_only_if_asked_for(tmp_path):
    assert "output_token_ids" not in planned(tmp_path).data_schema.names


def test_the_steps_schema_is_the_contract():
    ints = ["context_length", "num_nodes", "tree_depth", "top1_depth", "num_accepted"]
    ints += ["num_committed"]
    seconds = "predicted_verify predicted_step prefill draft build verify commit other step"
    assert STEPS_SCHEMA.equals(
        pa.schema(
            [
                ("row_id", pa.string()),
                ("sample_index", pa.int32()),
                ("unit", pa.int32()),
                ("worker", pa.string()),
                ("attempt", pa.int32()),
                ("device", pa.string()),
                ("method", pa.string()),
                ("step", pa.int64()),
                *((name, pa.int32()) for name in ints),
                ("expected_tokens", pa.float32()),
                ("expected_tokens_raw", pa.float32()),
                ("batch_size", pa.int32()),
                ("budget_nodes", pa.int32()),
                ("prefill_tokens", pa.int32()),
                *((f"{name}_seconds", pa.float32()) for name in seconds.split()),
            ]
        )
    )


def test_a_unit_becomes_sorted_rows_whatever_order_they_end_in(tmp_path):
    plan = planned(tmp_path, decoding__samples_per_row=2, output__output_token_ids=True)
    builder, rows = builder_of(plan)
    keys = list(builder.pending())
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for position, sample in reversed(keys):
        assert not builder.complete
        builder.add(completion(rows.row_ids[position], sample), num_migrations=position)
    assert builder.complete
    assert not list(builder.pending())
    data, steps = builder.tables()
    assert data.schema == plan.data_schema
    assert data.slice(3).to_pylist() == [
        {
            "prompt": "say 1",
            "id": 1,
            "row_id": "f00000-000000000001",
            "sample_index": 1,
            "output": "answer f00000-000000000001 1",
            "finish_reason": "stop",
            "error": None,
            "error_kind": None,
            "num_prompt_tokens": 7,
            "num_output_tokens": 5,
            "num_steps": 2,
            "tokens_per_step": 2.0,
            "output_token_ids": [1, 2, 3, 4, 5],
            "worker": "w1",
            "device": "cuda",
            "migrations": 1,
        }
    ]
    assert data["row_id"].to_pylist() == [rows.row_ids[p] for p, _ in keys]
    assert data["sample_index"].to_pylist() == [s for _, s in keys]
    assert steps.schema == STEPS_SCHEMA
    first = steps.to_pylist()[0]
    assert (first["unit"], first["worker"], first["attempt"], first["device"]) == (
        0,
        "w1",
        9,
        "cuda",
    )
    assert steps["method"].to_pylist()[:3] == ["prefill", "bastion", "bastion"]
    assert steps["verify_seconds"].to_pylist()[0] == pytest.approx(0.2)


def test_step_records_add_up_to_the_tokens(tmp_path):
    data, steps = answer(planned(tmp_path), 0)
    sums = steps.group_by("row_id").aggregate([("num_committed", "sum")])
    assert dict(
        zip(sums["row_id"].to_pylist(), sums["num_committed_sum"].to_pylist(), strict=True)
    ) == dict(zip(data["row_id"].to_pylist(), data["num_output_tokens"].to_pylist(), strict=True))


def test_faults_are_rows_without_an_output(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [b"\xff", {"prompt": "a"}, {"prompt": "b"}])
    plan = make_plan(make_job(file, tmp_path / "out", output__output_token_ids=True), Target())
    builder, rows = builder_of(plan)
    assert list(builder.pending()) == [(1, 0), (2, 0)]
    builder.add_fault(rows.row_ids[1], 0, RowFault("prompt_too_long", "9 > 8"), num_prompt_tokens=9)
    failed = dataclasses.replace(
        completion(rows.row_ids[2]), finish_reason="error", fault=RowFault("poison", "died 3 times")
    )
    builder.add(failed)
    data, steps = builder.tables()
    names = ["output", "finish_reason", "error_kind", "num_prompt_tokens", "num_output_tokens"]
    names += ["num_steps", "tokens_per_step", "output_token_ids"]
    assert [tuple(row[n] for n in names) for row in data.to_pylist()] == [
        (None, "error", "invalid_utf8", 0, 0, 0, None, None),
        (None, "error", "prompt_too_long", 9, 0, 0, None, None),
        (None, "error", "poison", 7, 0, 0, None, None),
    ]
    assert data["error"].to_pylist()[1:] == ["9 > 8", "died 3 times"]
    assert data["prompt"].to_pylist() == [None, "a", "b"]
    assert steps.num_rows == 0


def test_the_first_of_two_outcomes_stands(tmp_path):
    builder, rows = builder_of(planned(tmp_path))
    for row in rows.row_ids:
        builder.add(completion(row, text="first"))
        builder.add(completion(row, text="second"))
        builder.add_fault(row, 0, RowFault("poison", "late"))
    assert set(builder.tables().data["output"].to_pylist()) == {"first"}


def test_a_lone_surrogate_in_an_output_is_replaced(tmp_path):
    builder, rows = builder_of(planned(tmp_path))
    for row in rows.row_ids:
        builder.add(completion(row, text="a\ud800"))
    assert set(builder.tables().data["output"].to_pylist()) == {"a\ufffd"}


def test_an_incomplete_unit_has_no_tables(tmp_path):
    builder, _ = builder_of(planned(tmp_path))
    with pytest.raises(AssertionError, match="unit 0 has outcomes to come"):
        builder.tables()


def test_steps_can_be_off(tmp_path):
    assert answer(planned(tmp_path, output__steps="off"), 0).steps is None


@given(st.integers(0, 3), st.integers(0, 10**6))
def test_steps_are_sampled_by_whole_rows(file, row):
    name = f"f{file:05d}-{row:012d}"
    kept = [records_steps(f"sample:{f}", name) for f in (0.1, 0.5, 0.9, 1.0)]
    assert kept == sorted(kept)
    assert kept[-1]


def test_a_sample_of_the_steps_has_about_its_share():
    kept = sum(records_steps("sample:0.1", f"f00000-{i:012d}") for i in range(10_000))
    assert 850 < kept < 1150  # five standard deviations; the hash is fixed


# --- collisions ---------------------------------------------------------------------------------


@pytest.fixture
def colliding(tmp_path):
    rows = [{"prompt": "a", "output": "old", "Error": 1, "x": 2}]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def columns_of(file, tmp_path, mode):
    plan = make_plan(make_job(file, tmp_path / "out", output__on_collision=mode), Target())
    return answer(plan, 0).data.to_pylist()[0]


def test_colliding_columns_are_refused_by_name(colliding, tmp_path):
    with pytest.raises(DataError, match=r"\['output', 'Error'\].*prefix or drop_input"):
        columns_of(colliding, tmp_path, "error")


def test_colliding_columns_can_get_a_prefix(colliding, tmp_path):
    row = columns_of(colliding, tmp_path, "prefix")
    assert list(row)[:5] == ["prompt", "input_output", "input_Error", "x", "row_id"]
    assert (row["input_output"], row["input_Error"], row["x"]) == ("old", 1, 2)
    assert row["output"].startswith("answer")


def test_colliding_columns_can_be_dropped(colliding, tmp_path):
    row = columns_of(colliding, tmp_path, "drop_input")
    assert list(row)[:3] == ["prompt", "x", "row_id"]
    assert row["output"].startswith("answer")


def test_a_prefixed_name_that_is_taken_is_refused(tmp_path):
    rows = [{"prompt": "a", "output": "old", "input_output": "older"}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="input_output"):
        columns_of(file, tmp_path, "prefix")


def test_the_prompt_itself_may_be_dropped(tmp_path):
    pq.write_table(pa.table({"output": ["a", "b"]}), tmp_path / "a.parquet")
    job = make_job(
        tmp_path, tmp_path / "out", input__prompt="output", output__on_collision="drop_input"
    )
    data, _ = answer(make_plan(job, Target()), 0)
    assert data.column_names[0] == "row_id"
    assert data.num_rows == 2
