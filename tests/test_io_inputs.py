"""Inputs wherever they are: finding them behind URLs, and stopping when one changes in mid-run."""

import json
import os
import time

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from io_jobs import Target, make_job, read, write_jsonl
from object_servers import Breakage, TinyGcs, Unreliable, serving

from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.places import RemotePlace
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.planning import make_plan, open_plan, with_operational
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.retries import Retries
from bastion_batch.io.sources import find_paths

# Otherwise gcsfs asks a service of Google's what kind of bucket it is, through gRPC.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

SECRET = "k3y-of-mine"


def lines(*prompts):
    return b"".join(json.dumps({"prompt": p}).encode() + b"\n" for p in prompts)


def parquet(*prompts, group=2):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": list(prompts)}), sink, row_group_size=group)
    return sink.getvalue().to_pybytes()


def content(suffix, *prompts):
    return lines(*prompts) if suffix == "jsonl" else parquet(*prompts)


def prompts_of(plan):
    with UnitReader(plan) as reader:
        units = [reader.read(unit) for unit in range(plan.num_units)]
    return [p for rows in units for p in rows.table["prompt"].to_pylist()]


class Bucket:
    """A folder of objects behind a URL."""

    def __init__(self, url, options):
        self.url = url
        self.options = options
        self._fs, self._base = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)

    def put(self, name, payload):
        self._fs.pipe_file(f"{self._base}/{name}", payload)
        return f"{self.url}/{name}"

    def remove(self, name):
        self._fs.rm_file(f"{self._base}/{name}")


@pytest.fixture(scope="module")
def moto():
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = Unreliable(moto_server.DomainDispatcherApplication(moto_server.create_backend_app))
    with serving(server) as url:
        options = {"key": "test", "secret": SECRET, "endpoint_url": url}
        fsspec.filesystem("s3", **options).mkdir("inputs")
        yield server, options


@pytest.fixture(params=["memory", "s3"])
def bucket(request, tmp_path):
    if request.param == "memory":
        return Bucket(f"memory://{tmp_path.name}", {})
    server, options = request.getfixturevalue("moto")
    server.sent.clear()
    return Bucket(f"s3://inputs/{tmp_path.name}", options)


def job_of(bucket, path, output, **changes):
    return make_job(path, output, input__storage_options=bucket.options, **changes)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_objects_are_planned_and_read_like_files(bucket, tmp_path, suffix):
    bucket.put(f"b.{suffix}", content(suffix, "p4", "p5"))
    first = bucket.put(f"a.{suffix}", content(suffix, "p0", "p1", "p2", "p3"))
    bucket.put("_SUCCESS", b"")
    bucket.put("notes.txt", b"")
    expected = [f"p{i}" for i in range(6)]
    for path in (bucket.url, f"{bucket.url}/*.{suffix}", [first, f"{bucket.url}/[ab].{suffix}"]):
        plan = make_plan(job_of(bucket, path, tmp_path / "out", output__unit_rows=1), Target())
        assert [f.name for f in plan.inputs] == [f"a.{suffix}", f"b.{suffix}"]
        assert prompts_of(plan) == expected
    one = make_plan(job_of(bucket, first, tmp_path / "out"), Target())
    assert prompts_of(one) == expected[:4]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing.jsonl", "missing.jsonl does not exist"),
        ("*.parquet", "matches no file"),
        ("data.jsonl.gz", ".jsonl.gz files are not supported"),
        ("folder", "holds no input file"),
        ("empty.jsonl", "is empty"),
        ("torn.parquet", "is not a Parquet file"),
    ],
)
def test_a_refused_object_is_named(bucket, tmp_path, path, says):
    for name in ("data.jsonl.gz", "folder/notes.txt", "empty.jsonl"):
        bucket.put(name, b"")
    if path == "torn.parquet":
        bucket.put(path, b"PAR1 and nothing more")
    with pytest.raises(DataError) as refused:
        make_plan(job_of(bucket, f"{bucket.url}/{path}", tmp_path / "out"), Target())
    assert says in str(refused.value)
    assert path in str(refused.value)


def test_a_url_of_an_unknown_protocol_is_refused_without_its_credentials():
    with pytest.raises(DataError, match=r"input foo://x/a\.jsonl cannot be opened: Protocol not"):
        find_paths(["foo://user:secret@x/a.jsonl"])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_object_that_changes_in_mid_run_stops_the_reader(bucket, tmp_path, suffix):
    before, after = ([f"{word}{i}" for i in range(8)] for word in ("p", "q"))
    url = bucket.put(f"a.{suffix}", content(suffix, *before))
    job = job_of(bucket, url, tmp_path / "out", output__unit_rows=2)
    plan = make_plan(job, Target())
    with UnitReader(plan) as reader:
        assert reader.read(0).table["prompt"].to_pylist() == before[:2]
        bucket.put(f"a.{suffix}", content(suffix, *after))
        with pytest.raises(DataError, match=rf"a\.{suffix} has changed since .* then, .* now"):
            reader.read(1)
    with pytest.raises(DataError, match="has changed"):
        read(plan, 0)
    bucket.remove(f"a.{suffix}")
    with pytest.raises(DataError, match=rf"a\.{suffix} cannot be read"):
        read(plan, 0)


def test_an_object_with_an_etag_is_known_by_it_without_being_read(tmp_path, moto):
    server, options = moto
    bucket = Bucket(f"s3://inputs/{tmp_path.name}", options)
    url = bucket.put("a.jsonl", lines("p"))
    server.sent.clear()
    state = RemotePlace(url, options).state(url)
    assert state.fingerprint.startswith("etag ")
    assert [request.method for request in server.sent] == ["HEAD"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_objects_of_google_are_planned_and_read_like_files(tmp_path, suffix):
    pytest.importorskip("gcsfs")
    with serving(Unreliable(TinyGcs())) as url:
        bucket = Bucket(f"gs://bucket/{tmp_path.name}", {"token": "anon", "endpoint_url": url})
        bucket.put(f"b.{suffix}", content(suffix, "p2"))
        bucket.put(f"a.{suffix}", content(suffix, "p0", "p1"))
        for path in (bucket.url, f"{bucket.url}/*.{suffix}"):
            plan = make_plan(job_of(bucket, path, tmp_path / "out"), Target())
            assert prompts_of(plan) == ["p0", "p1", "p2"]
        bucket.put(f"b.{suffix}", content(suffix, "q2"))
        with pytest.raises(DataError, match=rf"b\.{suffix} has changed"):
            prompts_of(plan)


def test_a_request_for_an_object_is_made_again(tmp_path, moto):
    server, options = moto
    bucket = Bucket(f"s3://inputs/{tmp_path.name}", options)
    url = bucket.put("a.jsonl", lines("p0", "p1"))
    slept = []
    place = RemotePlace(url, options, retries=Retries(sleep=slept.append))
    server.breakages.append(Breakage("GET", "a.jsonl", 503, done=False))
    content = lines("p0", "p1")
    assert place.open(url, len(content)).read() == content
    assert len(slept) == 1


def test_secrets_are_in_no_file_of_the_output_nor_shown(tmp_path, moto):
    _, options = moto
    bucket = Bucket(f"s3://inputs/{tmp_path.name}", options)
    url = bucket.put("a.jsonl", lines("p0", "p1"))
    job = job_of(bucket, url, tmp_path / "out")
    plan = open_plan(job, Target())
    assert SECRET not in repr(plan)
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert files
    assert not any(SECRET.encode() in p.read_bytes() for p in files)
    again = with_operational(load_plan(tmp_path / "out"), job)
    assert prompts_of(again) == ["p0", "p1"]


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("how", ["in place", "renamed over"])
def test_a_file_that_changes_in_mid_run_stops_the_reader(tmp_path, suffix, how):
    before, after = ([f"{word}{i}" for i in range(8)] for word in ("p", "q"))
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(content(suffix, *before))
    plan = make_plan(make_job(file, tmp_path / "out", output__unit_rows=2), Target())
    with UnitReader(plan) as reader:
        assert reader.read(0).table["prompt"].to_pylist() == before[:2]
        changed = file if how == "in place" else tmp_path / "new"
        changed.write_bytes(content(suffix, *after))
        changed.replace(file)
        with pytest.raises(DataError) as stopped:
            reader.read(1)
    planned = plan.inputs[0]
    assert f"input {file} has changed since the job was planned" in str(stopped.value)
    assert f"{planned.num_bytes} bytes, fingerprint {planned.fingerprint} then" in str(
        stopped.value
    )


def test_a_file_cut_short_in_mid_run_stops_the_reader(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(parquet(*[f"p{i}" * 1000 for i in range(64)]))
    plan = make_plan(make_job(file, tmp_path / "out", output__unit_rows=1), Target())
    with UnitReader(plan) as reader:
        reader.read(0)
        os.truncate(file, 100)
        with pytest.raises(DataError, match="has changed"):
            reader.read(plan.num_units - 1)


def test_lines_that_moved_between_the_ends_of_a_file_stop_the_reader(tmp_path):
    rows = [{"prompt": f"{i:03d}" * 300} for i in range(300)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    plan = make_plan(make_job(file, tmp_path / "out", output__unit_rows=1), Target())
    stretch = file.read_bytes().splitlines(keepends=True)
    stretch[150:152] = [stretch[150][:20] + stretch[150][21:], b" " + stretch[151]]
    file.write_bytes(b"".join(stretch))
    assert file.stat().st_size == plan.inputs[0].num_bytes
    with pytest.raises(DataError, match=r"a\.jsonl has changed .* no line begins at byte"):
        read(plan, 151)
    assert read(plan, 152).table["prompt"].to_pylist() == [rows[152]["prompt"]]


@pytest.mark.parametrize("days", [-10_000, 10_000])
def test_the_time_of_a_file_is_no_part_of_it(tmp_path, days):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(4)])
    job = make_job(file, tmp_path / "out", output__unit_rows=1)
    plan = open_plan(job, Target())
    with UnitReader(plan) as reader:
        reader.read(0)
        other = time.time() + days * 86_400
        os.utime(file, (other, other))
        assert reader.read(1).table["prompt"].to_pylist() == ["p1"]
    assert open_plan(job, Target()).job_id == plan.job_id


def test_of_many_files_those_that_differ_are_shown(tmp_path):
    for i in range(200):
        write_jsonl(tmp_path / "in" / f"{i:03d}.jsonl", [{"prompt": f"p{i}"}])
    job = make_job(tmp_path / "in", tmp_path / "out")
    open_plan(job, Target())
    write_jsonl(tmp_path / "in" / "117.jsonl", [{"prompt": "other"}])
    with pytest.raises(OutputError) as refused:
        open_plan(job, Target())
    assert "117.jsonl" in str(refused.value)
    assert "118.jsonl" not in str(refused.value)
    (tmp_path / "in" / "118.jsonl").rename(tmp_path / "in" / "118b.jsonl")
    with pytest.raises(DataError, match=r"\['118.jsonl'\] -> \['118b.jsonl'\]|118b"):
        with_operational(load_plan(tmp_path / "out"), job)
