"""A driver on a real cluster whose nodes are not alike, go away, and have workers that hang."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from cluster_nodes import ELSEWHERE, of_run
from ray_nodes import SOON, Job, log_of
from scripted_driver import wait_until

from bastion_batch.cluster.connect import RUN_VARIABLE
from bastion_batch.io.plan_file import load_plan

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_workers_leave_a_node_that_drains_and_hung_ones_are_replaced(nodes, tmp_path):
    going, _ = nodes.add(), nodes.add()  # a worker each
    job = Job(tmp_path, nodes.cluster.address, num_rows=300, no_progress_seconds=3)
    driver = job.start(0.05)
    wait_until(lambda: len(job.workers()) == 2)
    run = f"bastion-batch-{load_plan(job.output).job_id}-1"
    assert len(of_run(RUN_VARIABLE, run)) >= 3, "the coordinator and two workers"
    nodes.add()
    nodes.drain(going)
    wait_until(lambda: "told to end" in log_of(job, "w*"))
    wait_until(lambda: len(job.workers()) == 3 and job.workers()[-1]["counts"]["num_steps"])
    os.kill(job.workers()[-1]["engine"]["pid"], signal.SIGSTOP)
    output = job.end(driver)
    job.check()
    assert "Ray is draining the node" in output
    assert "makes no progress" in output
    assert "\r" not in output
    wait_until(lambda: not of_run(RUN_VARIABLE, run), seconds=15)
    logs = {p.name for p in (job.output / "_bastion/logs").iterdir()}
    workers = {f"{w['worker']}-{w['attempt']}.log" for w in job.workers()}
    assert logs >= workers | {"driver-1.log", "coordinator-1.log"}


JUDGE = """
import json, sys
import ray
from cluster_nodes import NodeStore
from bastion_batch.cluster.environment import usable_nodes
from bastion_batch.cluster.fleet import cluster_nodes
from bastion_batch.errors import InputError
ray.init(address=sys.argv[1], log_to_driver=False)
store = NodeStore(sys.argv[2])
store.make_directories()
nodes = [node for node in cluster_nodes() if node.num_cpus]
try:
    judged = usable_nodes(nodes, store)
    print(json.dumps({"usable": [(n.node_id, n.host) for n in judged.usable], "refused": judged.refused}))
except InputError as error:
    print(json.dumps({"error": str(error)}))
assert store.names("_bastion/tmp") == []
"""


def judge(address, output):
    ended = subprocess.run(
        [sys.executable, "-c", JUDGE, address, output],
        env=os.environ | SOON,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_nodes_that_differ_are_named_and_not_used(nodes, tmp_path):
    stale = tmp_path / "stale"
    metadata = stale / "transformers-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    blind = nodes.add(**{ELSEWHERE: str(tmp_path / "nowhere")})
    other = nodes.add(PYTHONPATH=os.pathsep.join([str(stale), SOON["PYTHONPATH"]]))
    good = nodes.add()
    (tmp_path / "out").mkdir()
    judged = judge(nodes.cluster.address, tmp_path / "out")
    assert [n for n, _ in judged["usable"]] == [good]
    assert "does not see the output's storage" in judged["refused"][blind]
    assert re.search(r"it has transformers 0\.0\.1 \(the driver: ", judged["refused"][other])


def test_when_no_node_is_left_the_job_is_refused(nodes, tmp_path):
    nodes.add(**{ELSEWHERE: str(tmp_path / "nowhere")})
    (tmp_path / "out").mkdir()
    error = judge(nodes.cluster.address, tmp_path / "out")["error"]
    assert error.startswith(f"no node can be used for output {tmp_path / 'out'}:\n  node ")


def test_a_process_id_that_is_another_runs_by_now_is_left_alone():
    from bastion_batch.cluster.fleet import kill_if_of_run

    sleepers = {
        run: subprocess.Popen(["sleep", "60"], env=os.environ | {RUN_VARIABLE: run})
        for run in ("run-1", "run-2")
    }
    wait_until(lambda: all(of_run(RUN_VARIABLE, run) for run in sleepers))
    kill_if_of_run("run-1", sleepers["run-2"].pid)
    kill_if_of_run("run-1", sleepers["run-1"].pid)
    assert sleepers["run-1"].wait(10) == -signal.SIGKILL
    assert sleepers["run-2"].poll() is None
    kill_if_of_run("run-2", sleepers["run-2"].pid)
    sleepers["run-2"].wait(10)
    kill_if_of_run("run-2", sleepers["run-2"].pid)
