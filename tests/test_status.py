"""`status`: what an output tells of its job, in every state, from its files alone."""

import json
import os
import re
import threading
import time
from dataclasses import asdict, replace

import pytest
from io_jobs import planned, run_all, run_unit

from bastion_batch.cluster.driver_lock import DRIVER, this_process
from bastion_batch.cluster.ledger import Held
from bastion_batch.cluster.messages import AttemptRecord, Progress
from bastion_batch.cluster.worker_states import worker_states
from bastion_batch.core.balance import WorkerView
from bastion_batch.io.store import open_store
from bastion_batch.progress import ProgressFile
from bastion_batch.records import EngineTotals
from bastion_batch.status import read_status, status_table


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def plan(tmp_path):
    return planned(tmp_path, output__unit_rows=5)


PROGRESS = Progress(
    num_outputs=10,
    num_done=6,
    num_committed=5,
    num_failed=0,
    num_units=2,
    num_units_done=1,
    num_workers=1,
    num_tokens=30,
    elapsed_seconds=9.0,
    tokens_per_second=4.0,
    tokens_per_step=2.0,
    mean_nodes=1.0,
    speedup=None,
    eta_seconds=100.0,
)


def write_driver(output, driver):
    open_store(output).put(DRIVER, json.dumps(asdict(driver)).encode())


def look(output, plan, watch_seconds=0.5):
    said = []
    status = read_status(output, plan, say=said.append, watch_seconds=watch_seconds)
    assert json.loads(json.dumps(asdict(status)))["state"] == status.state
    return status, said


def test_a_job_that_was_only_planned(output, plan):
    status, _ = look(output, plan)
    assert (status.state, status.num_outputs, status.driver) == ("not running", 0, None)
    text = status_table(status)
    assert "0 of 10" in text
    assert "none so far" in text


def test_a_running_job(output, plan):
    run_unit(output, plan, 0)
    write_driver(output, this_process(1).touched())
    ProgressFile(output).write(PROGRESS)
    record = {
        "name": "mine",
        "job_id": plan.job_id,
        "complete": False,
        "invocations": [
            {
                "invocation": 1,
                "status": "running",
                "workers": [
                    {
                        "worker": "w0",
                        "attempt": 65537,
                        "num_units": 1,
                        "engine": {"host": "here", "device": "cpu"},
                    }
                ],
            }
        ],
    }
    open_store(output).put("run.json", json.dumps(record).encode())
    status, said = look(output, plan)
    assert (status.state, status.num_outputs, status.num_units) == ("running", 5, 1)
    assert status.driver_lives
    assert said == []
    assert status.driver_age_seconds < 5
    assert status.progress_age_seconds < 5
    assert 95 < status.eta_seconds <= 100
    text = status_table(status)
    assert f"process {os.getpid()} on " in text
    assert "seen alive 0 s ago" in text
    assert "rows 6/10" in text
    assert "1: w0 (cpu, here)" in text
    assert "1, the last one running" in text


def test_a_running_jobs_workers_are_shown_as_they_are_now(output, plan):
    records = [
        AttemptRecord(
            "w0",
            65537,
            True,
            {"device": "NVIDIA RTX A6000", "max_batch": 96, "mismatch": "pool a selects A100"},
            EngineTotals(num_steps=10, step_seconds=0.5, predicted_seconds=0.4),
            1,
            view=WorkerView(None, 1234.5),
            num_running=90,
        )
    ]
    held = [
        Held("w0", 65537, "a", 1.5, 3600.0, True),
        Held("w1", 65538, "b", None, 60.0, True),
        Held("w2", 65539, "b", None, 60.0, False),
    ]
    write_driver(output, this_process(1).touched())
    progress = PROGRESS._replace(cost=1.5)
    ProgressFile(output).write(progress, worker_states(records, held))
    status, _ = look(output, plan)
    assert [w["worker"] for w in status.workers] == ["w0", "w1"], "the third has ended"
    assert status.cost == 1.5
    text = status_table(status)
    assert re.search(r"^cost +\$1\.50$", text, re.M)
    assert re.search(
        r"^w0 +a +decodes +NVIDIA RTX A6000 +90/96 +1,23[45] +- +50\.0 ms \(40\.0 predicted\) +1\.50$",
        text,
        re.M,
    )
    assert re.search(r"^w1 +b +loads +- +- +- +- +- +-$", text, re.M)
    assert "warning: pool a selects A100" in text


@pytest.mark.parametrize("probe", [{"num_texts": 3}, {"readings": [{"odd": 1}]}, [1], "passed"])
def test_a_probe_of_another_version_is_no_matter(output, plan, probe):
    run_all(output, plan)
    status, _ = look(output, plan)
    worker = {"worker": "w0", "device": "CPU", "host": "h", "drafter": "d", "probe": probe}
    older = {name: worker[name] for name in ("worker", "device", "host")}
    text = status_table(replace(status, workers=(worker, older)))
    assert re.search(r"^drafter +d \(probed by another version\)$", text, re.M)


def test_a_driver_that_is_gone(output, plan):
    run_unit(output, plan, 0)
    write_driver(output, replace(this_process(1), pid=2**22 + 1).touched())
    ProgressFile(output).write(PROGRESS)
    status, _ = look(output, plan)
    assert (status.state, status.driver_lives, status.eta_seconds) == ("not running", False, None)
    assert "it is gone" in status_table(status)


def test_a_complete_job(output, plan):
    run_all(output, plan)
    write_driver(output, replace(this_process(1), ended=True))
    status, _ = look(output, plan)
    assert (status.state, status.num_outputs, status.eta_seconds) == ("complete", 10, None)
    assert "it has ended" in status_table(status)


def test_a_driver_on_another_machine_is_watched_for_a_touch(output, plan):
    elsewhere = replace(this_process(1), machine="elsewhere", host="far")
    write_driver(output, elsewhere)
    status, said = look(output, plan)
    assert not status.driver_lives
    assert said == ["the driver is on another machine; looking for up to 0 s"]

    def touch():
        time.sleep(0.3)
        write_driver(output, elsewhere.touched())

    thread = threading.Thread(target=touch)
    thread.start()
    status, _ = look(output, plan, watch_seconds=10.0)
    thread.join()
    assert status.driver_lives
    assert status.state == "running"


def test_a_damaged_progress_file_is_no_matter(output, plan):
    open_store(output).put("_bastion/progress.json", b"{")
    assert look(output, plan)[0].progress is None
