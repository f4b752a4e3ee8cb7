"""A whole job on a local Ray whose output is in an object store that loses answers."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from object_servers import Breakage, Unreliable, serving
from scripted_driver import wait_until

from bastion_batch.io.object_store import ObjectStore
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.results import load_steps, prove_complete, read_totals
from bastion_batch.io.store import LOGS, TEMPORARY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

DRIVER = Path(__file__).with_name("scripted_driver.py")
SECRET = "not-to-be-shown"
URL = "s3://bucket/answers"


@pytest.fixture
def server():
    return Unreliable(moto_server.DomainDispatcherApplication(moto_server.create_backend_app))


@pytest.fixture
def store(server, tmp_path):
    """The output of the job in ``job.yaml``."""
    with serving(server) as url:
        options = {"key": "test", "secret": SECRET, "endpoint_url": url}
        (tmp_path / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(24))
        )
        job = {
            "input": {"path": "prompts.jsonl", "prompt": "prompt"},
            "output": {"path": URL, "unit_rows": 3, "storage_options": options},
            "model": {"target": "scripted"},
            "decoding": {"max_new_tokens": 40},
            "workers": {"count": 2},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        store = ObjectStore(URL, options)
        store._fs.mkdir("bucket")
        yield store


@contextmanager
def driver(directory, step_seconds):
    """A driver of the job, which does not outlive the test."""
    process = subprocess.Popen(
        [sys.executable, DRIVER, "job.yaml", str(step_seconds), "--takeover"],
        cwd=directory,
        env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(DRIVER.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_job_survives_lost_answers_and_a_killed_driver(store, server, tmp_path):
    with driver(tmp_path, 0.05):
        wait_until(lambda: len(server.matching("PUT", "/answers/data/")) > 2, seconds=120.0)
    for part, done in [("/data/", True), ("/steps/", True), ("/data/", False), ("run.json", True)]:
        server.breakages += [Breakage("PUT", part, 503, done=done)] * 2
    with driver(tmp_path, 0.0) as second:
        out, err = second.communicate(timeout=180)
    assert second.returncode == 0, err
    assert not server.breakages

    plan = load_plan(store)
    prove_complete(store, plan)
    assert read_totals(store, plan).num_outputs == 24
    assert load_steps(store).num_rows > 0
    assert store.names(TEMPORARY) == []
    record = json.loads(store.read("run.json"))
    assert record["complete"]
    assert [i["status"] for i in record["invocations"]] == ["killed", "finished"]
    assert json.loads(store.read("_bastion/progress.json"))["num_units_done"] == 8
    assert f"{LOGS}/driver-2.log" in store.names(LOGS)
    assert f"output           {URL}/data" in out
    shown = [out, err, store.read("run.json").decode(), store.read("_bastion/plan.json").decode()]
    shown += [store.read(name).decode() for name in store.names(LOGS)]
    assert not [text for text in shown if SECRET in text]
