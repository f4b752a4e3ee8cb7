"""The driver's parts that need no Ray: placement, restarts, addresses, records and displays."""

import io
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from bastion_batch.cluster.connect import cluster_address, in_uploaded_working_dir
from bastion_batch.cluster.invocation import require_places
from bastion_batch.cluster.ledger import Held
from bastion_batch.cluster.messages import AttemptRecord, Progress
from bastion_batch.cluster.placement import Placement
from bastion_batch.cluster.pools import Node, pools_of
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.run import resolve_paths
from bastion_batch.cluster.signals import drain_seconds, submission_id
from bastion_batch.config import WorkersConfig, parse_job
from bastion_batch.errors import InputError, OutputError
from bastion_batch.progress import LiveDisplay, PlainDisplay, ProgressFile, progress_line
from bastion_batch.records import EngineTotals
from bastion_batch.report import JobResult, duration, read_command, table
from bastion_batch.run_record import (
    PoolTotals,
    RunRecord,
    all_pools,
    exactness,
    read_record,
    redacted,
)

HEAD = Node("head", "head", 4, 0)
H100 = Node("a", "h100", 16, 2)
A6000 = Node("b", "a6000", 8, 1)


def place(nodes, config):
    placement = Placement(pools_of(config))
    placement.look(nodes)
    return list(placement.slots.values())


def test_one_worker_per_gpu_on_its_node():
    slots = place([HEAD, H100, A6000], WorkersConfig())
    assert [(s.worker, s.node.host, s.device, s.workers_on_node) for s in slots] == [
        ("w0", "h100", "cuda", 2),
        ("w1", "h100", "cuda", 2),
        ("w2", "a6000", "cuda", 1),
    ]


def test_workers_beyond_the_gpus_may_go_anywhere_later():
    slots = place([A6000], WorkersConfig(count=2))
    assert [slot.node for slot in slots] == [A6000, None]


def test_cpu_workers_spread_by_cores():
    slots = place([HEAD, A6000], WorkersConfig(count=3, device="cpu"))
    assert sorted(slot.node.host for slot in slots) == ["a6000", "a6000", "head"]
    assert len(place([HEAD], WorkersConfig())) == 1


def test_missing_devices_leave_workers_without_a_place():
    assert place([HEAD], WorkersConfig(device="cuda")) == []
    config = WorkersConfig(count=1, device="cpu")
    assert [s.node for s in place([HEAD._replace(num_cpus=0)], config)] == [None]


def test_what_workers_wait_for_is_told_and_what_cannot_come_is_refused():
    def required(may_grow, **pool):
        workers = WorkersConfig(
            pools=({"name": "big", "select": {"label": {"zone": "x"}}, **pool},)
        )
        placement = Placement(pools_of(workers), may_grow=may_grow)
        placement.look([A6000])
        return require_places(placement, [A6000], may_grow=may_grow)

    missing = "no machine now for pool big"
    assert missing in required(True, count=2, device="cuda")
    with pytest.raises(InputError, match=rf"no worker has a place; {missing}.*a6000"):
        required(False, count=2, device="cuda")
    with pytest.raises(InputError, match=r"no machine tells the device of pool big.*say `device`"):
        required(True, count=2)


def test_a_dead_worker_is_due_again_after_a_growing_pause():
    restarts = Restarts(["w0"], invocation=2, pause_seconds=1.0, rng=lambda: 0.0)
    assert restarts.due(0.0) == ["w0"]
    assert restarts.started("w0") == 2 * 65536 + 1
    assert restarts.due(99.0) == []
    assert not restarts.died("w0", 100.0, fruitful=False)
    assert (restarts.due(100.9), restarts.due(101.0)) == ([], ["w0"])
    assert restarts.started("w0") == 2 * 65536 + 2
    assert not restarts.died("w0", 200.0, fruitful=False)
    assert (restarts.due(201.9), restarts.due(202.0)) == ([], ["w0"])


def test_workers_that_die_together_do_not_start_together():
    chances = iter([0.0, 1.0])
    restarts = Restarts(["w0", "w1"], 1, pause_seconds=1.0, rng=lambda: next(chances))
    for worker in ("w0", "w1"):
        restarts.started(worker)
        restarts.died(worker, 0.0, fruitful=False)
    assert restarts.due(1.0) == ["w0"]
    assert restarts.due(1.5) == ["w0", "w1"]


def test_a_worker_that_was_told_to_leave_is_due_at_once():
    restarts = Restarts(["w0"], 1)
    for _ in range(5):
        restarts.started("w0")
        restarts.left("w0", 7.0)
        assert restarts.due(7.0) == ["w0"]


def test_three_fruitless_starts_in_a_row_remove_a_worker():
    restarts = Restarts(["w0", "w1"], invocation=1)
    for fruitful in (False, False, True, False, False):
        assert not restarts.died("w0", 0.0, fruitful=fruitful)
    assert restarts.died("w0", 0.0, fruitful=False)
    assert restarts.due(1e9) == ["w1"]
    assert not restarts.all_removed
    assert restarts.died("w1", 0.0, fruitful=True, mendable=False)
    assert restarts.all_removed


@pytest.fixture
def ray_address(monkeypatch, tmp_path):
    """Sets the address of the environment, on a machine where nobody ran `ray start`."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return lambda value: monkeypatch.setenv("RAY_ADDRESS", value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "Ray Client"),
        ("http://head:8265", "ray job submit"),
        ("127.0.0.1:1", "no Ray answers"),
        ("head", "host:port"),
        ("auto", "no Ray cluster runs"),
    ],
)
def test_unusable_addresses_are_refused(ray_address, address, message):
    ray_address(address)
    with pytest.raises(InputError, match=message):
        cluster_address()


def test_the_cluster_of_ray_start_is_used_while_it_answers(ray_address, tmp_path):
    ray_address("")
    assert cluster_address() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert cluster_address() == address
        ray_address("local")
        assert cluster_address() is None
        ray_address(address)
        assert cluster_address() == address
    ray_address("")
    assert cluster_address() is None


def job_at(output):
    return parse_job(
        {
            "input": {"path": "in.jsonl", "prompt": "prompt"},
            "output": {"path": output},
            "model": {"target": "scripted"},
        }
    )


UPLOADED = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0123")


def test_a_relative_output_is_refused_in_rays_copy_of_a_working_directory():
    assert in_uploaded_working_dir(UPLOADED / "sub")
    with pytest.raises(OutputError, match=r"--set output.path=\$PWD/out/quickstart"):
        resolve_paths(job_at("out/quickstart"), UPLOADED)
    resolved = resolve_paths(job_at("/data/out"), UPLOADED)
    assert resolved.output.path == "/data/out"
    assert resolved.input.path == str(UPLOADED / "in.jsonl")


RAY_JOB = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})
}


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 20.0),
        (RAY_JOB, 2.0),
        (RAY_JOB | {"RAY_JOB_STOP_WAIT_TIME_S": "60"}, 59.0),
        (RAY_JOB | {"RAY_JOB_STOP_WAIT_TIME_S": "soon"}, 2.0),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "1"}, 1.0),
    ],
)
def test_an_orderly_end_takes_no_longer_than_whoever_stops_the_job_waits(environment, seconds):
    assert drain_seconds(environment) == seconds


def test_a_submitted_job_knows_its_name():
    assert submission_id(RAY_JOB) == "raysubmit_1"
    assert submission_id({}) is None
    assert submission_id({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"}) is None


def test_elsewhere_relative_paths_become_absolute():
    assert resolve_paths(job_at("out"), Path("/home/me")).output.path == "/home/me/out"


def attempt(dtype="float32", device_type="cpu", **counts):
    info = {"dtype": dtype, "device_type": device_type, "device": "x"}
    return AttemptRecord("w0", 65537, True, info, EngineTotals(**counts), 1)


@pytest.fixture
def recorded(tmp_path):
    (tmp_path / "_bastion/tmp").mkdir(parents=True)
    return job_at(str(tmp_path))


def test_run_json_keeps_every_invocation_and_sees_which_were_killed(recorded):
    for invocation in (1, 2):
        record = RunRecord(recorded, "job1")
        assert not record.complete
        record.begin(invocation, "2026-01-01T00:00:00+00:00")
        record.note("running", [attempt(num_row_steps=5)], wall_seconds=2, decoding_seconds=1)
        record.save()
    record.save({"num_outputs": 3})
    saved = read_record(recorded.output.path)
    assert [i["status"] for i in saved["invocations"]] == ["killed", "running"]
    assert saved["complete"]
    assert saved["totals"] == {"num_outputs": 3}
    assert RunRecord(recorded, "job1").complete
    assert not RunRecord(recorded, "another").complete
    assert set(saved["invocations"][0]["versions"]) >= {"torch", "ray", "pyarrow", "python"}


def held(attempt_number, pool, price, seconds):
    return Held(f"w{attempt_number}", attempt_number, pool, price, seconds, True)


def test_run_json_has_the_money_of_every_pool(recorded):
    for invocation in (1, 2):
        record = RunRecord(recorded, "job1")
        record.begin(invocation, "2026-01-01T00:00:00+00:00")
        accounts = [
            held(65537, "h100", 3.6, 1000.0),
            held(65538, "h100", 3.6, 500.0),  # it never loaded its models
            held(65539, "own", None, 1800.0),
        ]
        attempts = [attempt(num_committed=3000)]
        record.note("finished", attempts, accounts, wall_seconds=2, decoding_seconds=1)
        record.save()
    saved = read_record(recorded.output)["invocations"]
    assert saved[0]["workers"][0]["cost"] == pytest.approx(1.0)
    assert saved[0]["workers"][0]["held_seconds"] == 1000.0
    h100, own = all_pools(saved)
    assert (h100.pool, h100.num_workers, h100.num_tokens) == ("h100", 2, 6000)
    assert h100.held_hours == pytest.approx(3000 / 3600)
    assert (h100.cost, h100.tokens_per_dollar) == (pytest.approx(3.0), pytest.approx(2000.0))
    assert (own.cost, own.tokens_per_dollar, own.held_hours) == (None, None, 1.0)


def begun(job, invocation):
    record = RunRecord(job, "job1")
    record.begin(invocation, "2026-01-01T00:00:00+00:00")
    record.note("running", [], wall_seconds=1, decoding_seconds=1)
    record.save()
    return record


def test_a_driver_that_was_superseded_takes_nothing_away_from_the_next(recorded):
    old, new = begun(recorded, 1), begun(recorded, 2)
    new.note("finished", [], wall_seconds=2, decoding_seconds=2)
    new.save({"num_outputs": 3})
    old.note("failed", [], wall_seconds=9, decoding_seconds=9)
    old.save()
    saved = read_record(recorded.output)
    assert [i["status"] for i in saved["invocations"]] == ["failed", "finished"]
    assert saved["complete"]
    assert saved["totals"] == {"num_outputs": 3}


@pytest.mark.parametrize("torn", ["", '{"job_id": "job1", "inv', "[]"])
def test_a_torn_record_is_begun_anew_and_this_is_said(recorded, torn, caplog):
    begun(recorded, 1)
    (Path(recorded.output.path) / "run.json").write_text(torn)
    assert read_record(recorded.output) is None
    assert "run.json is damaged and is begun anew" in caplog.text
    begun(recorded, 2)
    assert [i["invocation"] for i in read_record(recorded.output)["invocations"]] == [2]


@pytest.mark.parametrize(
    ("workers", "exact"),
    [
        ([("float32", "cpu")], True),
        ([("float32", "cpu"), ("float32", "cpu")], True),
        ([("bfloat16", "cpu")], False),
        ([("float32", "cpu"), ("float32", "cuda")], False),
        ([("float32", "cpu"), ("float64", "cpu")], False),
        ([], False),
    ],
)
def test_exactness_is_claimed_in_full_precision_on_one_device_type_only(workers, exact):
    engines = [{"engine": {"dtype": d, "device_type": t}} for d, t in workers]
    assert exactness([{"workers": engines}])["text_equals_plain_decoding"] is exact


def test_credentials_are_redacted():
    job = {"input": {"path": ["s3://key:secret@bucket/x", "/a@b"], "storage_options": {"k": "v"}}}
    assert redacted(job) == {
        "input": {"path": ["s3://bucket/x", "/a@b"], "storage_options": "redacted"}
    }


def progress(**changes):
    values = {
        "num_outputs": 100, "num_done": 40, "num_committed": 32, "num_failed": 0, "num_units": 10,
        "num_units_done": 3, "num_workers": 2, "num_tokens": 900, "elapsed_seconds": 20.0,
        "tokens_per_second": 431.4, "tokens_per_step": 2.306, "mean_nodes": 7.0, "speedup": 1.4142,
        "eta_seconds": 80.2,
    }  # fmt: skip
    return Progress(**(values | changes))


def test_the_progress_line_says_what_is_known():
    assert progress_line(progress()) == (
        "rows 40/100 | 431 tokens/s | 2.31 tokens/step | 1.41x plain | 80.2 s left | 2 workers"
    )
    paid = progress(cost=1.239, tail_seconds=79.0)
    assert "| 80.2 s left, the last rows | $1.24 | 2 workers" in progress_line(paid)
    starting = progress(num_workers=0, num_tokens=0, num_done=0)
    assert progress_line(starting) == "rows 0/100 | workers load the models"


def test_plain_lines_come_at_most_every_ten_seconds():
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        display.show(progress(num_done=second))
    display.say("stopping")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["0/100", "10/100", "20/100"]
    assert lines[-1] == "stopping"
    assert "\r" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_display_draws_and_says(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = LiveDisplay(stream)
    display.show(progress())
    display.say("worker w0 ended: [brackets] stay")
    display.close()
    assert "rows 40/100" in stream.getvalue()
    assert "worker w0 ended: [brackets] stay" in stream.getvalue()


def test_the_progress_file_is_replaced_every_other_second(recorded):
    now = [0.0]
    file = ProgressFile(recorded.output.path, clock=lambda: now[0])
    path = Path(recorded.output.path) / "_bastion/progress.json"
    file.write(progress(num_done=1))
    file.write(progress(num_done=2))
    assert json.loads(path.read_text())["num_done"] == 1
    file.write(progress(num_done=100, num_units_done=10))
    assert json.loads(path.read_text())["num_done"] == 100
    now[0] = 2.0
    file.write(progress(num_done=3))
    assert json.loads(path.read_text())["num_done"] == 3
    assert not any((path.parent / "tmp").iterdir())


RESULT = JobResult(
    name="quick", output="/out/quick", complete=True, num_rows=96, num_outputs=192,
    num_outputs_planned=192, num_failed=1, error_kinds={"null_prompt": 1}, num_prompt_tokens=10,
    num_output_tokens=12345, wall_seconds=3725.2, tokens_per_second=430.07, tokens_per_step=2.306,
    mean_nodes=7.25, speedup=1.4142,
)  # fmt: skip


def test_the_end_table():
    assert table(RESULT).splitlines() == [
        "rows             96 x 2 samples",
        "failed rows      1 (1 null_prompt)",
        "output tokens    12,345",
        "wall time        1:02:05 h",
        "tokens/s         430.1",
        "tokens per step  2.31",
        "mean nodes       7.2",
        "speedup          1.41x over plain decoding, measured in this job",
        "output           /out/quick/data",
        'read it          python -c "import pyarrow.dataset as d;'
        " print(d.dataset('/out/quick/data').to_table())\"",
    ]


def test_the_end_table_tells_the_money_of_every_pool():
    pools = (PoolTotals("h100", 8, 2.0, 5.0, 9000), PoolTotals("own", 2, 1.5, None, 4000))
    lines = table(replace(RESULT, pools=pools)).splitlines()
    assert lines[8:11] == [
        "cost             $5.00; 2,469 tokens per dollar",
        "  h100           8 workers, 2.00 h, 9,000 tokens, $5.00; 1,800 tokens per dollar",
        "  own            2 workers, 1.50 h, 4,000 tokens",
    ]
    assert "cost" not in table(replace(RESULT, pools=pools[1:]))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (99.94, "99.9 s"), (100, "1:40 min"), (3600, "1:00:00 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_read_command_works_for_any_path(tmp_path):
    import subprocess
    import sys

    import pyarrow as pa
    import pyarrow.parquet as pq

    data = tmp_path / 'it\'s "$HOME"'
    data.mkdir()
    pq.write_table(pa.table({"answer": ["forty-two"]}), data / "u.parquet")
    command = read_command(str(data)).replace("python", sys.executable, 1)
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "forty-two" in shown.stdout
