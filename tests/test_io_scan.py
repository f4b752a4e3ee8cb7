"""Planning's reading of text: every line found, every type seen, and fast at any size."""

import io
import json
import random
import resource
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from io_jobs import Target, make_job

from bastion_batch.io.jsonl import ColumnTypes, Shape, iter_lines, parse_line, schema_of
from bastion_batch.io.jsonl_index import index_lines
from bastion_batch.io.planning import make_plan
from bastion_batch.io.spans import MAX_SPAN_BYTES, TextSpans

scalars = st.sampled_from(
    [
        *("1", "-7", "0", "123456789012345", "1234567890123456", "9007199254740993", "-0"),
        *("9223372036854775807", "9223372036854775808", "1" + "0" * 40),
        *("1.5", "0.30000000000000004", "1e3", "-2E+5", "12345678901234567890.0", "NaN"),
        *("-Infinity", "true", "false", "null", "nul", "01", "1.", "-", '"unended'),
        *('""', '"text"', r'"a \"b\": 1"', r'"\\"', r'"\ud800"', '"caf\u00e9"', '": "'),
    ]
)
texts = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{k}": {v}' for k, v in pairs) + "}"
        )
    ),
    max_leaves=6,
)
keys = st.sampled_from(["x", "y", r"x\"", r"\u0078", r"\\", "x "])
rows = st.lists(st.tuples(keys, texts), max_size=4).map(
    lambda pairs: "{" + ", ".join(f'"{k}"\t:{v}' for k, v in pairs) + "}"
)
contents = st.lists(
    st.binary(max_size=6)
    | (rows | texts).map(str.encode)
    | st.sampled_from([b"", b" \t\r", b"\x0b"])
)


def blocks_of(content, block_bytes=1 << 20):
    return list(index_lines(io.BytesIO(content), block_bytes))


def lines_of(blocks):
    return [block.line(i) for block in blocks for i in range(len(block.starts))]


@settings(deadline=None, max_examples=150)
@given(contents, st.booleans(), st.booleans(), st.integers(3, 40))
def test_the_lines_of_a_file_are_those_that_a_worker_reads(lines, has_mark, ends, block_bytes):
    content = b"\xef\xbb\xbf" * has_mark + b"\n".join(lines) + b"\n" * ends
    assert lines_of(blocks_of(content, block_bytes)) == list(iter_lines(io.BytesIO(content)))


@settings(deadline=None, max_examples=120)
@given(st.lists(rows, min_size=1, max_size=12), st.integers(3, 400))
def test_one_line_of_each_shape_tells_the_types_of_all(lines, block_bytes):
    content = "\n".join(lines).encode()
    every, few = {}, ColumnTypes()
    for line in iter_lines(io.BytesIO(content)):
        for name, value in parse_line(line).values.items():
            every.setdefault(name, Shape()).observe(value)
    for block in blocks_of(content, block_bytes):
        few.observe(block)
    assert schema_of(few.columns, "x").equals(schema_of(every, "x"), check_metadata=True)
    assert few.columns == every


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"b": 1}'),
        ('{"a": [1]}', '{"a": [1, 1]}'),
        ('{"a": true}', '{"a": null}'),
        ('{"a": {}}', '{"a": []}'),
        ('{"a": "b"}', '{"a", "b"}'),
    ],
)
def test_lines_that_tell_other_types_are_of_other_shapes(one, other):
    [block] = blocks_of(f"{one}\n{other}\n".encode())
    assert len(set(block.shapes.tolist())) == 2


def test_content_and_digits_are_no_part_of_a_shape():
    alike = [
        '{"a": 1, "b": "x", "c": 0.5}',
        '{"a":-22, "b": "say \\"hi\\": {1}", "c": 1e300}\r',
        ' {"a": 333,"b" :"",   "c": 0.30000000000000004}',
    ]
    [block] = blocks_of("".join(f"{line}\n" for line in alike).encode())
    assert len(set(block.shapes.tolist())) == 1
    assert not block.is_singular.any()


def test_a_text_file_is_cut_into_spans_wherever_its_blocks_end():
    ends = np.cumsum(np.full(400, MAX_SPAN_BYTES // 100))
    template = blocks_of(b"{}\n")[0]
    spans = TextSpans(3)
    for start in range(0, 400, 7):
        own = slice(start, start + 7)
        spans.add(
            template._replace(
                starts=ends[own] - MAX_SPAN_BYTES // 100,
                ends=ends[own],
                numbers=np.arange(400)[own] + 2,
            )
        )
    found = spans.spans()
    assert [len(span.rows) for span in found] == [100] * 4
    assert [row for span in found for row in span.rows] == list(range(2, 402))
    assert all(isinstance(span.rows, range) for span in found)
    assert [int(span.offsets[0]) for span in found] == [
        int(ends[100 * i - 1]) * (i > 0) for i in range(4)
    ]


# --- scale --------------------------------------------------------------------------------------


def write_text(path, num_rows):
    """Rows of about 200 bytes."""
    chance = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "caf\u00e9", 'say "hi"\n']
    with path.open("w") as file:
        for i in range(num_rows):
            text = " ".join(chance.choices(words, k=20))
            file.write(json.dumps({"prompt": text, "id": i, "score": i / 3, "tags": ["a"]}) + "\n")
    return path


def test_text_is_planned_at_speed(tmp_path):
    file = write_text(tmp_path / "a.jsonl", 100_000)
    job = make_job(file, tmp_path / "out")
    make_plan(make_job(write_text(tmp_path / "b.jsonl", 10), tmp_path / "out"), Target())
    started = time.process_time()
    plan = make_plan(job, Target())
    rate = file.stat().st_size / 1e6 / (time.process_time() - started)
    sys.stdout.write(f"text: {rate:.0f} MB/s of CPU time\n")
    assert plan.num_rows == 100_000
    assert rate > 100 / 3


def write_shards(folder, num_files, rows_per_file):
    """One Parquet file, and links to it: planning reads each as a file of its own."""
    folder.mkdir()
    first = folder / "00000.parquet"
    prompts = pa.array([f"prompt {i}" for i in range(rows_per_file)])
    pq.write_table(pa.table({"prompt": prompts, "id": range(rows_per_file)}), first)
    for i in range(1, num_files):
        (folder / f"{i:05d}.parquet").hardlink_to(first)
    return folder


def plan_shards(tmp_path, num_files, rows_per_file):
    job = make_job(write_shards(tmp_path / "in", num_files, rows_per_file), tmp_path / "out")
    started = time.monotonic()
    plan = make_plan(job, Target())
    seconds = time.monotonic() - started
    sys.stdout.write(
        f"{num_files} files, {plan.num_rows} rows, {plan.num_units} units: {seconds:.1f} s\n"
    )
    assert plan.num_rows == num_files * rows_per_file
    return seconds


def test_many_parquet_files_are_planned_at_speed(tmp_path):
    assert plan_shards(tmp_path, 500, 1000) < 3 * 60 * 500 / 10_000


@pytest.mark.slow
def test_ten_thousand_parquet_files_of_ten_million_rows(tmp_path):
    assert plan_shards(tmp_path, 10_000, 1000) < 3 * 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20, "KiB"


COORDINATOR = """
import pickle, resource, sys
num_units, units_per_span = 10_000_000, 1000
payload = pickle.dumps([[i // units_per_span for i in range(num_units)], [1] * num_units])
from bastion_batch.cluster.coordinator import Coordinator
spans, num_outputs = pickle.loads(payload)
coordinator = Coordinator(spans=spans, num_outputs=num_outputs)
del spans, num_outputs, payload
coordinator.register("w0", 1, {}, 0.0)
for _ in range(4):
    coordinator.lease(1, 0.0)
coordinator.progress(1.0)
assert not {"torch", "pyarrow"} & set(sys.modules)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
"""


@pytest.mark.slow
def test_the_coordinator_of_ten_million_units_needs_less_than_a_gigabyte():
    ended = subprocess.run(
        [sys.executable, "-c", COORDINATOR], check=True, capture_output=True, text=True
    )
    sys.stdout.write(f"coordinator: {float(ended.stdout):.0f} MiB at most, all included\n")
    assert float(ended.stdout) < 1000


@pytest.mark.slow
def test_ten_million_text_rows(tmp_path):
    part = write_text(tmp_path / "part", 100_000).read_bytes()
    file = tmp_path / "a.jsonl"
    with file.open("wb") as out:
        for _ in range(100):
            out.write(part)
    started = time.process_time()
    plan = make_plan(make_job(file, tmp_path / "out"), Target())
    seconds = time.process_time() - started
    file.unlink()
    sys.stdout.write(f"{plan.num_rows} rows, {len(part) / 1e4 / seconds:.0f} MB/s of CPU time\n")
    assert plan.num_rows == 10_000_000
    assert len(part) / 1e4 / seconds > 100 / 3
