"""`compact`: the same rows in few files, elsewhere; what it refuses, and what a failure leaves."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_store import Fault, FaultStore, MemoryStore
from io_jobs import planned, run_all, run_unit

from bastion_batch.errors import OutputError
from bastion_batch.io import compact as module
from bastion_batch.io.compact import MARKER, compact
from bastion_batch.io.layout import data_name
from bastion_batch.io.results import load_steps


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def finished(tmp_path, **changes):
    plan = planned(tmp_path, num_rows=60, **changes)
    run_all(tmp_path / "out", plan)
    return plan


def files_of(directory):
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def test_rows_and_steps_are_the_same_in_one_file_each(tmp_path, output):
    plan = finished(tmp_path)
    before = {path: (output / path).read_bytes() for path in files_of(output)}
    done = compact(output, tmp_path / "dest", plan, steps=True)
    assert done.files == ("data/part-00000.parquet", "steps/part-00000.parquet")
    assert done.num_rows == 60
    assert files_of(tmp_path / "dest") == {*done.files, MARKER}
    rows = pq.read_table(tmp_path / "dest" / "data")
    assert rows.equals(pq.read_table(output / "data"))
    assert rows.schema.equals(plan.data_schema)
    assert pq.read_table(tmp_path / "dest" / "steps").equals(load_steps(output))
    assert {path: (output / path).read_bytes() for path in files_of(output)} == before
    marker = json.loads((tmp_path / "dest" / MARKER).read_text())
    assert marker == {
        "job_id": plan.job_id,
        "num_units": plan.num_units,
        "num_rows": 60,
        "complete": True,
        "files": list(done.files),
    }


def test_a_full_file_is_followed_by_another(tmp_path, output):
    plan = finished(tmp_path)
    store = MemoryStore()
    done = compact(output, store, plan, file_bytes=1)
    assert len(done.files) == 1  # of one row group: all these rows are far from filling two
    parts = module._Parts(store, "steps", plan.data_schema, plan, file_bytes=1)
    table = pq.read_table(output / "data").replace_schema_metadata(None)
    big = pa.concat_tables([table] * (module.ROW_GROUP_BYTES // table.nbytes + 1))
    parts.add(big)
    parts.add(table)
    assert parts.close() == ["steps/part-00000.parquet", "steps/part-00001.parquet"]
    sizes = [pq.read_metadata(pa.BufferReader(store.contents[n])).num_rows for n in parts.names]
    assert sizes == [big.num_rows, table.num_rows]


def test_an_incomplete_output_is_refused_unless_told(tmp_path, output):
    plan = planned(tmp_path)
    run_unit(output, plan, 1)
    with pytest.raises(OutputError, match=f"not complete: 1 of {plan.num_units} units; --partial"):
        compact(output, tmp_path / "dest", plan)
    assert not (tmp_path / "dest").exists()
    done = compact(output, tmp_path / "dest", plan, partial=True)
    assert done.num_units == 1
    assert pq.read_table(tmp_path / "dest" / "data").equals(pq.read_table(output / data_name(1)))
    assert json.loads((tmp_path / "dest" / MARKER).read_text())["complete"] is False


def test_nothing_yet_is_a_file_with_the_columns(tmp_path, output):
    plan = planned(tmp_path)
    compact(output, tmp_path / "dest", plan, partial=True)
    rows = pq.read_table(tmp_path / "dest" / "data")
    assert (rows.num_rows, rows.schema) == (0, plan.data_schema)


def test_a_destination_with_files_or_in_the_output_is_refused(tmp_path, output):
    plan = finished(tmp_path)
    with pytest.raises(OutputError, match="lies in the output"):
        compact(output, output, plan)
    with pytest.raises(OutputError, match="lies in the output"):
        compact(output, output / "data" / "compact", plan)
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "mine.txt").touch()
    with pytest.raises(OutputError, match="is not empty"):
        compact(output, tmp_path / "dest", plan)
    with pytest.raises(OutputError, match="is not a directory"):
        compact(output, tmp_path / "in.jsonl", plan)
    (tmp_path / "beside").mkdir()
    compact(output, tmp_path / "outer", plan)  # a name that only begins like the output's


def test_a_failure_leaves_nothing_behind(tmp_path, output):
    plan = finished(tmp_path)
    memory = MemoryStore()
    faulty = FaultStore(
        memory, lambda op, name: Fault.ERROR_AFTER if (op, name) == ("put", MARKER) else None
    )
    with pytest.raises(OSError, match=r".+"):
        compact(output, faulty, plan)
    assert memory.contents == {}
