"""Jobs submitted to a cluster of their own on this machine, by the commands of the README."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scripted_driver import read_json, wait_until
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.io.plan import load_plan
from bastion_batch.io.results import prove_complete

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
RAY = Path(sys.executable).with_name("ray")


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Head:
    """A head node, with its own ports, token and directory, and what it takes to talk to it."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="bb", dir="/tmp")  # sockets need a short path
        port, dashboard, agent, client, metrics, runtime = free_ports(6)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.env |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.log = Path(self.directory, "start.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    RAY,
                    "start",
                    "--head",
                    "--block",
                    "--num-cpus=2",
                    f"--temp-dir={self.directory}",
                    f"--port={port}",
                    f"--dashboard-port={dashboard}",
                    f"--dashboard-agent-listen-port={agent}",
                    f"--ray-client-server-port={client}",
                    f"--metrics-export-port={metrics}",
                    f"--runtime-env-agent-port={runtime}",
                    f"--object-store-memory={100 * 2**20}",
                ],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda: self.answers(dashboard), seconds=90)

    def answers(self, port):
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def submit(self, working_dir, *arguments):
        return subprocess.run(
            [
                RAY,
                "job",
                "submit",
                f"--address={self.address}",
                f"--working-dir={working_dir}",
                "--",
                sys.executable,
                "jobs/generate.py",
                *arguments,
            ],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(1)
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def head():
    head = Head()
    yield head
    head.stop()


@pytest.fixture
def working_dir(tmp_path):
    """What a user submits from: the package, the jobs, and a job on a tiny model."""
    home = tmp_path / "home"
    (home / "jobs").mkdir(parents=True)
    shutil.copytree(
        ROOT / "bastion_batch", home / "bastion_batch", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "jobs" / "generate.py", home / "jobs")
    (home / "jobs" / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12))
    )
    (home / "jobs" / "job.yaml").write_text(
        json.dumps(
            {
                "input": {"path": "jobs/prompts.jsonl", "prompt": "prompt"},
                "output": {"path": "out/job"},
                "model": {"target": str(tmp_path / "model"), "drafter": None, "dtype": "float32"},
                "decoding": {"max_new_tokens": 8},
            }
        )
    )
    return home


def test_a_relative_output_is_refused_in_a_submitted_job(head, working_dir):
    ended = head.submit(working_dir, "jobs/job.yaml")
    assert ended.returncode == 1  # of `ray job submit`; the driver's is 2
    output = ended.stdout + ended.stderr
    assert "exit code 2" in output
    assert "output.path out/job is relative" in output
    assert "--set output.path=$PWD/out/job" in output
    assert "Traceback" not in output


def test_a_submitted_job_writes_where_the_user_asked(head, working_dir, tmp_path):
    save_tiny_checkpoint(tmp_path / "model")
    output = working_dir / "out" / "job"
    ended = head.submit(working_dir, "jobs/job.yaml", "--set", f"output.path={output}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rows             12" in ended.stdout
    plan = load_plan(output)
    prove_complete(output, plan)
    assert pq.read_table(output / "data").num_rows == 12
    record = read_json(output / "run.json")
    assert record["complete"]
    assert record["exactness"]["text_equals_plain_decoding"]
    worker_dir = record["invocations"][0]["workers"][0]["engine"]
    assert worker_dir["dtype"].endswith("float32")

    again = head.submit(working_dir, "jobs/job.yaml", "--set", f"output.path={output}")
    assert again.returncode == 0
    assert "is complete; nothing to decode" in again.stdout + again.stderr
