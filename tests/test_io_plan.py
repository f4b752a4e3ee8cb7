import json
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from io_jobs import Target, make_job, planned, read, write_jsonl

from bastion_batch.config import JobConfig
from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.plan import PLAN_FORMAT
from bastion_batch.io.plan_file import load_plan, save_plan
from bastion_batch.io.planning import make_plan, open_plan, resolve_steps, with_operational
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.spans import MAX_SPAN_BYTES, Span
from bastion_batch.io.store import prepare_output
from bastion_batch.io.units import cut_units, rows_per_unit

ROWS = [{"prompt": f"p{i}", "id": i} for i in range(5)]


def plan_of(job):
    return make_plan(job, Target())


def refusal(tmp_path, inputs, **changes):
    with pytest.raises(DataError) as refused:
        plan_of(make_job(inputs, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
    return str(refused.value)


# --- bad inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing.jsonl", "does not exist"),
        ("none/*.jsonl", "matches no file"),
        ("foo://bucket/x.jsonl", "Protocol not known"),
        ("data.jsonl.gz", ".jsonl.gz files are not supported"),
        ("data.csv", "supported now"),
        ("data.arrow", "supported now"),
        ("empty.jsonl", "is empty"),
        ("blank.jsonl", "is empty"),
        ("empty.parquet", "is empty"),
        ("torn.parquet", "is not a Parquet file"),
        ("folder", "holds no input file"),
    ],
)
def test_a_refused_input_is_named(tmp_path, path, says):
    for name in ("data.jsonl.gz", "data.csv", "data.arrow", "empty.jsonl", "empty.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    message = refusal(tmp_path, path if "://" in path else tmp_path / path)
    assert says in message
    assert path in message


def test_a_hub_name_is_told_what_is_supported(tmp_path):
    assert "supported now" in refusal(tmp_path, "org/dataset")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    message = refusal(tmp_path, file, input__prompt="question")
    assert "'question'" in message
    assert "['prompt', 'id']" in message


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_that_cannot_hold_prompts_is_refused(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_jsonl(file, ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    assert "column 'id' holds int" in refusal(tmp_path, file, input__prompt="id")
    message = refusal(tmp_path, file, input__prompt=None, input__messages="id")
    assert "not a list of {role, content}" in message


def test_parquet_shards_of_different_schemas_are_named_with_the_difference(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "n": ["1"]}), tmp_path / "b.parquet")
    message = refusal(tmp_path, tmp_path)
    assert "n: int64 in a.parquet, string in b.parquet" in message


def test_a_mix_of_formats_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    assert "mix JSONL and Parquet" in refusal(tmp_path, tmp_path)


# --- finding and typing -------------------------------------------------------------------------


def test_inputs_are_sorted_and_taken_once(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    (tmp_path / "_temporary.jsonl").write_text("{")
    paths = [tmp_path / "c.jsonl", tmp_path / "*.jsonl", tmp_path]
    plan = plan_of(make_job(paths[2], tmp_path / "out"))
    assert [f.name for f in plan.inputs] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    both = plan_of(make_job([paths[0], tmp_path / "[ab].jsonl"], tmp_path / "out"))
    assert both.inputs == plan.inputs
    assert plan.num_rows == 15


def test_text_files_with_other_keys_share_one_schema(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "n": 1}])
    write_jsonl(tmp_path / "b.jsonl", [{"n": 2.5, "tags": ["t"], "prompt": "y", "mixed": 1}])
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "z", "mixed": "m"}])
    (tmp_path / "d.jsonl").touch()
    with caplog.at_level(logging.WARNING):
        plan = plan_of(make_job(tmp_path, tmp_path / "out", output__unit_rows=1))
    assert "column 'mixed' fits no single type (integer, string)" in caplog.text
    assert "d.jsonl holds no rows" in caplog.text
    rows = [read(plan, i).table.to_pylist()[0] for i in range(3)]
    assert rows == [
        {"prompt": "x", "n": 1.0, "tags": None, "mixed": None},
        {"prompt": "y", "n": 2.5, "tags": ["t"], "mixed": "1"},
        {"prompt": "z", "n": None, "tags": None, "mixed": '"m"'},
    ]


def test_bad_lines_and_prompts_are_rows_and_blank_lines_are_not(tmp_path):
    lines = [b'{"prompt": "a"}', b"", b'{"prompt": "\xff"}', b"{oops", b'{"prompt": 5}', b"[]"]
    plan = plan_of(make_job(write_jsonl(tmp_path / "a.jsonl", lines), tmp_path / "out"))
    assert plan.num_rows == 5
    units = read_in(plan, range(plan.num_units))
    assert [i[-3:] for rows in units for i in rows.row_ids] == ["000", "002", "003", "004", "005"]
    faults = [fault for rows in units for fault in rows.faults]
    assert [f and f.kind for f in faults] == [
        None,
        "invalid_utf8",
        "invalid_json",
        "invalid_prompt",
        "invalid_json",
    ]
    assert faults[2].message.startswith("a.jsonl: line 4 is not JSON")
    assert pa.concat_tables(rows.table for rows in units)["prompt"].to_pylist() == [
        "a",
        None,
        None,
        "5",
        None,
    ]


def test_a_chat_column_of_no_single_type_is_json_text(tmp_path):
    chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": 5}], None]
    file = write_jsonl(tmp_path / "a.jsonl", [{"m": chat} for chat in chats])
    job = make_job(file, tmp_path / "out", input__prompt=None, input__messages="m")
    rows = read(plan_of(job), 0).table["m"].to_pylist()
    assert [row and json.loads(row) for row in rows] == chats


# --- every row once -----------------------------------------------------------------------------

cells = st.none() | st.text(max_size=4)
jsonl_files = st.lists(
    st.lists(
        st.none() | st.fixed_dictionaries({"prompt": cells, "n": st.integers() | cells}),
        max_size=20,
    ),
    min_size=1,
    max_size=3,
)


def read_in(plan, order):
    with UnitReader(plan) as reader:
        units = {unit: reader.read(unit) for unit in order}
    return [units[unit] for unit in range(plan.num_units)]


@settings(deadline=None, max_examples=60)
@given(jsonl_files, st.integers(1, 7) | st.just("auto"), st.randoms(use_true_random=False))
def test_every_line_is_read_once_in_any_order_of_units(tmp_path_factory, files, size, random):
    folder = tmp_path_factory.mktemp("jsonl")
    for i, rows in enumerate(files):
        write_jsonl(folder / f"{i}.jsonl", [b"" if row is None else row for row in rows])
    expected = [
        (f"f{i:05d}-{line:012d}", row["prompt"])
        for i, rows in enumerate(files)
        for line, row in enumerate(rows)
        if row is not None
    ]
    job = make_job(folder, folder / "out", output__unit_rows=size)
    if not expected:
        with pytest.raises(DataError, match="empty"):
            plan_of(job)
        return
    plan = plan_of(job)
    order = list(range(plan.num_units))
    random.shuffle(order)
    units = read_in(plan, order)
    assert [i for rows in units for i in rows.row_ids] == [i for i, _ in expected]
    table = pa.concat_tables(rows.table for rows in units)
    assert table.schema == plan.input_schema
    assert table["prompt"].to_pylist() == [prompt for _, prompt in expected]
    assert all(rows.table.num_rows <= (size if size != "auto" else 4) for rows in units)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_every_parquet_row_is_read_once_unchanged(tmp_path_factory, sizes, group, size, random):
    folder = tmp_path_factory.mktemp("parquet")
    tables = [
        pa.table(
            {
                "prompt": pa.array([f"{i} {j}" for j in range(n)]).dictionary_encode(),
                "when": pa.array(range(n), pa.timestamp("ms", tz="UTC")),
                "nested": [[{"x": j}] for j in range(n)],
            }
        )
        for i, n in enumerate(sizes)
    ]
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=group)
    plan = plan_of(make_job(folder, folder / "out", output__unit_rows=size))
    order = list(range(plan.num_units))
    random.shuffle(order)
    units = read_in(plan, order)
    ids = [f"f{i:05d}-{j:012d}" for i, n in enumerate(sizes) for j in range(n)]
    assert [i for rows in units for i in rows.row_ids] == ids
    table = pa.concat_tables(rows.table for rows in units)
    assert table.schema == tables[0].schema
    assert table.to_pylist() == pa.concat_tables(tables).to_pylist()


def test_empty_shards_and_row_groups_hold_no_rows(tmp_path):
    full = pa.table({"prompt": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", full.schema) as writer:
        for table in (full, full.slice(0, 0), full):
            writer.write_table(table)
    pq.write_table(full.slice(0, 0), tmp_path / "b.parquet")
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 3
    plan = plan_of(make_job(tmp_path, tmp_path / "out"))
    assert plan.num_rows == 4
    prompts = [read(plan, i).table["prompt"].to_pylist() for i in range(plan.num_units)]
    assert prompts == [["a", "b"], ["a", "b"]]
    assert "is empty" in refusal(tmp_path, tmp_path / "b.parquet")


def test_notes_of_the_writing_program_are_not_carried(tmp_path):
    table = pa.table({"prompt": ["a"]}).replace_schema_metadata(
        {"pandas": "{}", "huggingface": "{}"}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    plan = plan_of(make_job(tmp_path, tmp_path / "out"))
    assert plan.input_schema.metadata is None
    assert not plan.input_schema.field("prompt").metadata


def test_one_row_as_python_values(tmp_path):
    plan = planned(tmp_path)
    assert read(plan, 1).row(0) == {"prompt": "say 3", "id": 3}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_changed_file_stops_the_worker_and_is_named(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"

    def write(rows):
        if suffix == "jsonl":
            write_jsonl(file, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)

    write(ROWS)
    plan = plan_of(make_job(file, tmp_path / "out"))
    write([*ROWS[:-1], {"prompt": "P4", "id": 4}])
    with pytest.raises(DataError, match=rf"a\.{suffix} has changed since the job was planned"):
        read(plan, 0)
    file.unlink()
    with pytest.raises(DataError, match=rf"a\.{suffix} cannot be read"):
        read(plan, 0)


def test_a_change_in_the_last_bytes_of_a_large_file_is_seen(tmp_path):
    rows = [{"prompt": "x" * 1000} for _ in range(300)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    plan = plan_of(make_job(file, tmp_path / "out"))
    write_jsonl(file, [*rows[:-1], {"prompt": "x" * 999 + "y"}])
    with pytest.raises(DataError, match="has changed"):
        read(plan, 0)


def test_a_change_anywhere_in_a_large_parquet_footer_is_seen(tmp_path):
    file = tmp_path / "a.parquet"

    table = pa.table({"prompt": ["p"] * 2000})
    pq.write_table(table, file, row_group_size=1)
    content = file.read_bytes()
    plan = plan_of(make_job(file, tmp_path / "out"))
    middle = len(content) // 2
    assert 1 << 16 < middle < len(content) - (1 << 16)
    file.write_bytes(content[:middle] + b"?" + content[middle + 1 :])
    with pytest.raises(DataError, match="has changed"):
        read(plan, 0)


# --- units --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_units_are_even_contiguous_ranges_inside_a_span(sizes, max_rows):
    spans = [Span(i, 0, range(100, 100 + n), range(n)) for i, n in enumerate(sizes)]
    units = cut_units(spans, max_rows).to_pylist()
    for i, size in enumerate(sizes):
        own = [u for u in units if u["file"] == i]
        assert [u["row_start"] for u in own] == [u["offset"] + 100 for u in own]
        ends = [u["offset"] + u["num_rows"] for u in own]
        assert [0, *ends] == [*(u["offset"] for u in own), size]
        lengths = {u["num_rows"] for u in own}
        assert max(lengths) <= max_rows
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("num_rows", "samples", "expected"),
    [(1, 1, 4), (64 * 100, 1, 100), (6401, 1, 101), (10**6, 1, 2048), (640, 10, 10), (5, 50, 1)],
)
def test_automatic_units_split_a_job_in_64(num_rows, samples, expected):
    assert rows_per_unit("auto", num_rows * samples, samples) == expected


def test_text_is_cut_into_spans(tmp_path):
    line = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    plan = plan_of(make_job(write_jsonl(tmp_path / "a.jsonl", [line] * 7), tmp_path / "out"))
    assert 3 * len(line) < MAX_SPAN_BYTES < 4 * len(line)
    assert [(u["span"], u["num_rows"]) for u in plan.units.to_pylist()] == [(0, 3), (1, 3), (2, 1)]


def test_steps_are_sampled_in_large_jobs():
    assert [resolve_steps("auto", n) for n in (1, 100_000, 100_001)] == [
        "all",
        "all",
        "sample:0.01",
    ]
    assert resolve_steps("off", 1) == "off"


# --- the plan on disk ---------------------------------------------------------------------------


def same(one, other):
    fields = [f for f in type(one).__dataclass_fields__ if f != "units"]
    return one.units.equals(other.units) and all(
        getattr(one, f) == getattr(other, f) for f in fields
    )


def test_a_plan_comes_back_from_disk_and_from_pickle(tmp_path):
    plan = planned(tmp_path, num_rows=30, decoding__stop=["a", "b"], output__output_token_ids=True)
    loaded = load_plan(tmp_path / "out")
    assert same(plan, loaded)
    assert same(plan, pickle.loads(pickle.dumps(plan)))
    header = json.loads((tmp_path / "out/_bastion/plan.json").read_text())
    assert header["plan_format"] == PLAN_FORMAT
    assert (tmp_path / "out" / header["units_file"]).exists()
    assert "row_id: string" in header["columns"]["data"]


def test_no_plan_is_none_and_a_damaged_one_an_error(tmp_path):
    assert load_plan(tmp_path / "out") is None
    planned(tmp_path)
    (units,) = (tmp_path / "out/_bastion").glob("units-*.parquet")
    pq.write_table(pq.read_table(units).slice(1), units)
    with pytest.raises(OutputError, match="not what the plan names"):
        load_plan(tmp_path / "out")
    header = tmp_path / "out/_bastion/plan.json"
    header.write_text(
        header.read_text().replace(f'"plan_format": {PLAN_FORMAT}', '"plan_format": 1', 1)
    )
    with pytest.raises(OutputError, match=f"format 1; this version reads {PLAN_FORMAT}"):
        load_plan(tmp_path / "out")
    header.write_text("{")
    with pytest.raises(OutputError, match="cannot be read"):
        load_plan(tmp_path / "out")


def test_of_many_drivers_one_plan_stands(tmp_path):
    job = make_job(write_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "out")
    plans = [plan_of(job) for _ in range(16)]
    prepare_output(tmp_path / "out")
    with ThreadPoolExecutor(16) as pool:
        standing = list(pool.map(lambda plan: save_plan(tmp_path / "out", plan), plans))
    assert len({plan.job_id for plan in plans}) == 16
    assert {plan.job_id for plan in standing} == {load_plan(tmp_path / "out").job_id}
    assert not list((tmp_path / "out/_bastion/tmp").iterdir())


def test_a_different_job_is_refused_with_every_difference(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    job = make_job(file, tmp_path / "out")
    open_plan(job, Target())
    other = make_job(file, tmp_path / "out", decoding__seed=3, input__system="Be brief.")
    write_jsonl(file, ROWS[:4])
    with pytest.raises(OutputError) as refused:
        open_plan(other, Target(digest="d2"))
    message = str(refused.value)
    assert "decoding.seed: 0 -> 3" in message
    assert 'input.system: null -> "Be brief."' in message
    assert 'target_digest: "d1" -> "d2"' in message
    assert "input.files" in message
    assert "decoding.temperature" not in message


def test_operational_changes_continue_the_job(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = open_plan(make_job(file, tmp_path / "out"), Target())
    moved = tmp_path / "elsewhere" / "a.jsonl"
    moved.parent.mkdir()
    file.rename(moved)
    job = make_job(moved, tmp_path / "out", decoding__method="ar", output__steps="off")
    again = open_plan(job, Target())
    assert again.job_id == first.job_id
    assert again.steps == "off"
    assert read(again, 0).table["prompt"].to_pylist() == ["p0", "p1"]
    in_worker = with_operational(load_plan(tmp_path / "out"), job)
    assert same(again, in_worker)
    with pytest.raises(DataError, match="other files than planned"):
        with_operational(
            first,
            make_job(
                tmp_path / "*.json*",
                tmp_path / "out",
                input__path=str(write_jsonl(tmp_path / "b.jsonl", ROWS)),
            ),
        )


@pytest.mark.parametrize(
    "change",
    [
        {"input__system": "s"},
        {"output__on_collision": "prefix"},
        {"output__unit_rows": 7},
        {"model__dtype": "float32"},
        {"decoding__samples_per_row": 2},
    ],
)
def test_identity_fields_are_in_the_identity(tmp_path, change):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    one = plan_of(make_job(file, tmp_path / "out")).identity
    other = plan_of(make_job(file, tmp_path / "out", **change)).identity
    (name,) = change
    assert [k for k in one if one[k] != other[k]] == [name.replace("__", ".")]


def test_every_field_of_a_job_is_tagged():
    def untagged(model, prefix=""):
        for name, info in model.model_fields.items():
            if hasattr(info.annotation, "model_fields"):
                yield from untagged(info.annotation, f"{prefix}{name}.")
            elif not isinstance((info.json_schema_extra or {}).get("identity"), bool):
                yield f"{prefix}{name}"

    assert list(untagged(JobConfig)) == []


# --- the output directory -----------------------------------------------------------------------


def test_an_output_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "out/data").mkdir(parents=True)
    (tmp_path / "out/data/theirs.parquet").touch()
    with pytest.raises(OutputError, match="has files in data/ but no plan"):
        planned(tmp_path)


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        planned(tmp_path)


def test_an_output_under_a_file_is_refused():
    with pytest.raises(OutputError, match="cannot be written"):
        prepare_output(Path("/dev/null/out"))
