"""A cluster of one node in processes of its own, to submit jobs to."""

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

from scripted_driver import wait_until

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

    def submit(self, working_dir, *arguments, script="jobs/generate.py"):
        return subprocess.run(
            [
                RAY,
                "job",
                "submit",
                f"--address={self.address}",
                f"--working-dir={working_dir}",
                "--",
                sys.executable,
                script,
                *arguments,
            ],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def command(self, *arguments, cwd):
        """Start a command of ours that talks to this cluster; its output is in files."""
        return subprocess.Popen(
            [sys.executable, "-m", "bastion_batch.cli", *arguments],
            cwd=cwd,
            env=self.env | {"PYTHONPATH": str(ROOT), "RAY_API_SERVER_ADDRESS": self.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
