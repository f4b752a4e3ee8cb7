"""Whole jobs on a local Ray, with scripted engines, whose processes are killed.

The driver is a process of its own. Whatever dies, every row is there once, with its own text.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cluster_nodes import of_run
from scripted_driver import read_json, wait_until

from bastion_batch.cluster.connect import RUN_VARIABLE
from bastion_batch.cluster.scripted import scripted_ids
from bastion_batch.core.noise import row_key
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.results import load_steps, prove_complete
from bastion_batch.records import Request, SamplingParams

pytestmark = pytest.mark.ray

DRIVER = Path(__file__).with_name("scripted_driver.py")
NUM_ROWS = 60


class Job:
    """A job file, its output, and drivers for it."""

    def __init__(self, directory, num_workers=2):
        self.directory = directory
        self.output = directory / "out"
        prompts = directory / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(NUM_ROWS))
        )
        tree = {
            "input": {"path": str(prompts), "prompt": "prompt"},
            "output": {"path": str(self.output), "unit_rows": 3},
            "model": {"target": "scripted"},
            "decoding": {"max_new_tokens": 40},
            "workers": {"count": num_workers},
        }
        self.file = directory / "job.yaml"
        self.file.write_text(json.dumps(tree))

    def start(self, step_seconds=0.0, *marker):
        return subprocess.Popen(
            [sys.executable, DRIVER, self.file, str(step_seconds), *map(str, marker)],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(DRIVER.parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments):
        return self.end(self.start(*arguments))

    def end(self, driver):
        """Wait for a driver, and return its exit code and what it wrote."""
        out, err = driver.communicate(timeout=120)
        return subprocess.CompletedProcess([], driver.returncode, out, err)

    def record(self):
        return read_json(self.output / "run.json")

    def engines(self):
        """Process ids of the workers that the current invocation has registered."""
        invocations = self.record().get("invocations", [])
        return [w["engine"]["pid"] for w in invocations[-1]["workers"]] if invocations else []

    def wait_for_units(self, count):
        data = self.output / "data"
        wait_until(lambda: data.is_dir() and len(list(data.iterdir())) >= count)

    def check(self):
        """Prove the output, and that each text is its row's own."""
        plan = load_plan(self.output)
        prove_complete(self.output, plan)
        rows = pq.read_table(self.output / "data").to_pylist()
        assert [row["prompt"] for row in rows] == [f"question {i}" for i in range(NUM_ROWS)]
        for row in rows:
            request = Request(
                row_id=row["row_id"],
                prompt_ids=tuple(row["prompt"].encode()),
                sampling=SamplingParams(max_new_tokens=40),
                noise_key=row_key(0, row["row_id"], 0),
            )
            assert row["output"] == bytes(scripted_ids(request)).decode()
        steps = load_steps(self.output)
        assert sum(steps["num_committed"].to_pylist()) == sum(r["num_output_tokens"] for r in rows)
        named = {f"u{unit:08d}" for unit in range(plan.num_units)}
        assert {p.name.split("-")[0] for p in (self.output / "steps").iterdir()} == named
        assert list((self.output / "_bastion/tmp").iterdir()) == []


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_job_runs_to_its_end_and_is_then_left_alone(job):
    first = job.run(0.02)
    assert first.returncode == 0, first.stderr
    job.check()
    assert "\r" not in first.stderr
    assert len(first.stderr.splitlines()) < 10
    assert re.search(r"^rows +60$", first.stdout, re.M)
    assert re.search(
        r"^speedup +2\.00x over plain decoding, measured in this job$", first.stdout, re.M
    )
    record = job.record()
    assert record["complete"]
    assert record["totals"]["num_outputs"] == NUM_ROWS
    assert record["exactness"]["text_equals_plain_decoding"]
    assert [i["status"] for i in record["invocations"]] == ["finished"]
    assert {w["worker"] for w in record["invocations"][0]["workers"]} == {"w0", "w1"}
    assert not any(map(is_running, job.engines()))
    logs = {p.name for p in (job.output / "_bastion/logs").iterdir()}
    assert logs == {"driver-1.log", "coordinator-1.log", "w0-65537.log", "w1-65538.log"}
    assert not any("\r" in p.read_text() for p in (job.output / "_bastion/logs").iterdir())
    assert read_json(job.output / "_bastion/progress.json")["num_units_done"] == 20

    before = {p: p.stat().st_mtime_ns for p in job.output.rglob("*")}
    again = job.run()
    assert again.returncode == 0
    assert "is complete; nothing to decode" in again.stderr
    assert again.stdout == first.stdout
    assert {p: p.stat().st_mtime_ns for p in job.output.rglob("*.parquet")} == {
        p: t for p, t in before.items() if p.suffix == ".parquet"
    }


def kill_a_worker(job, moment):
    driver = job.start(0.05)
    pids = wait_until(job.engines)
    time.sleep(moment)
    os.kill(random.choice(pids), signal.SIGKILL)
    ended = job.end(driver)
    assert ended.returncode == 0, ended.stderr
    job.check()
    return ended


def test_a_killed_worker_is_replaced_and_no_row_is_lost(job):
    ended = kill_a_worker(job, 0.5)
    assert "its process is gone" in ended.stderr
    attempts = [w["attempt"] for w in job.record()["invocations"][0]["workers"]]
    assert len(attempts) > 1
    assert len(set(attempts)) == len(attempts)


def kill_the_driver(job, num_units):
    driver = job.start(0.05)
    job.wait_for_units(num_units)
    pids = job.engines()
    run = f"bastion-batch-{load_plan(job.output).job_id}-1"
    assert of_run(RUN_VARIABLE, run)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not any(map(is_running, pids)), seconds=15)
    wait_until(lambda: not of_run(RUN_VARIABLE, run), seconds=15)
    ended = job.run(0.0)
    assert ended.returncode == 0, ended.stderr
    job.check()


def test_a_killed_driver_leaves_no_worker_and_a_rerun_finishes(job):
    kill_the_driver(job, 2)
    invocations = job.record()["invocations"]
    assert [i["status"] for i in invocations] == ["killed", "finished"]
    assert min(w["attempt"] for w in invocations[1]["workers"]) == 2 * 65536 + 1


def test_a_worker_killed_between_its_two_files_leaves_no_trace(job, tmp_path):
    ended = job.run(0.0, tmp_path / "marker")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "marker").exists()
    job.check()


@pytest.mark.slow
def test_a_driver_that_is_taken_over_stops(job):
    first = job.start(0.4)
    job.wait_for_units(1)
    second = job.run(0.0, "--takeover")
    assert second.returncode == 0, second.stderr
    job.check()
    ended = job.end(first)
    assert ended.returncode == 1
    assert "another driver took over: process" in ended.stderr
    assert job.record()["complete"]
    statuses = [(i["invocation"], i["status"]) for i in job.record()["invocations"]]
    assert statuses == [(1, "failed"), (2, "finished")]
    job.check()


def stop_by(job, signum):
    """Send a signal to a driver in mid-run and everything it started, and check its end."""
    driver = job.start(0.4)
    wait_until(job.engines)
    refused = job.run()
    assert refused.returncode == 2
    assert f"process {driver.pid} on {socket.gethostname()}, since" in refused.stderr
    job.wait_for_units(1)
    run = f"bastion-batch-{load_plan(job.output).job_id}-1"
    assert set(job.engines()) <= set(of_run(RUN_VARIABLE, run))
    os.killpg(driver.pid, signum)
    ended = job.end(driver)
    assert ended.returncode == 128 + signum, ended.stderr
    assert "Traceback" not in ended.stderr
    wait_until(lambda: not of_run(RUN_VARIABLE, run), seconds=15)
    assert job.record()["invocations"][0]["status"] == "interrupted"


def test_ctrl_c_stops_the_job_which_can_go_on(job):
    stop_by(job, signal.SIGINT)
    assert job.run().returncode == 0
    job.check()


def test_sigterm_stops_the_job(job):
    stop_by(job, signal.SIGTERM)


IN_A_RAY_OF_THE_CALLERS = """
import sys, ray
from bastion_batch.cluster.run import run
from bastion_batch.cluster.scripted import ScriptedEngines
from bastion_batch.config import load_job
from bastion_batch.errors import JobFailedError, ModelError
from scripted_driver import FaultyEngines

ray.init(
    address="local",
    num_cpus=3,
    num_gpus=2,  # imagined: the engines have no use for them
    include_dashboard=False,
    object_store_memory=80 * 2**20,
)
before = {n["NodeID"] for n in ray.nodes()}
job = load_job(sys.argv[1])

try:
    run(job, engines=FaultyEngines(fault="broken"))
except JobFailedError as error:
    assert "no worker is left" in str(error), error
    assert "RuntimeError: CUDA driver initialization failed" in str(error), error
else:
    raise AssertionError("engines that cannot be loaded")

try:
    run(job, engines=FaultyEngines(fault="unknown"))
except ModelError as error:
    assert str(error) == "target scripted: layer type 'mamba' is not supported", error
else:
    raise AssertionError("a model that is refused")

result = run(job, engines=ScriptedEngines())
assert result.complete and result.num_outputs == 60
assert ray.is_initialized() and {n["NodeID"] for n in ray.nodes()} == before
assert ray.util.list_named_actors(all_namespaces=True) == []
"""


def test_a_ray_of_the_callers_is_used_and_left_as_it_was(tmp_path):
    job = Job(tmp_path, num_workers="auto")
    paths = os.pathsep.join([str(DRIVER.parents[1]), str(DRIVER.parent)])
    subprocess.run(
        [sys.executable, "-c", IN_A_RAY_OF_THE_CALLERS, job.file],
        env=os.environ | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled"},
        check=True,
        timeout=200,
    )
    job.check()
    statuses = [i["status"] for i in job.record()["invocations"]]
    assert statuses == ["failed", "failed", "finished"]
    workers = job.record()["invocations"][-1]["workers"]
    assert {w["worker"] for w in workers} == {"w0", "w1"}, "one for each GPU"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_workers_at_random_moments(tmp_path, seed):
    random.seed(seed)
    kill_a_worker(Job(tmp_path), random.uniform(0.0, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_drivers_at_random_moments(tmp_path, seed):
    random.seed(seed)
    kill_the_driver(Job(tmp_path), random.randrange(0, 18))
