"""Clusters of many nodes on one machine, and jobs whose driver is a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from scripted_driver import read_json, wait_until

from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.results import prove_complete

TESTS = Path(__file__).parent
STORE_BYTES = 80 * 2**20
SOON = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
}


class Nodes:
    """A head without room for workers, and the nodes that a test adds."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.added = []

    def add(self, *, labels=None, num_gpus=0, **environment):
        node = self.cluster.add_node(
            num_cpus=1 + num_gpus,
            num_gpus=num_gpus,
            labels=labels or {},
            object_store_memory=STORE_BYTES,
            env_vars=environment,
        )
        self.added.append(node)
        return node.node_id

    def drain(self, node_id, seconds=60):
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + seconds) * 1000)
        accepted, why = GcsClient(address=self.cluster.address).drain_node(
            node_id, reason, "preempted", deadline
        )
        assert accepted, why

    def clear(self):
        """Remove the added nodes, and wait until the cluster has noticed."""
        for node in self.added:
            self.cluster.remove_node(node, allow_graceful=False)
        self.added.clear()
        self.cluster.wait_for_nodes()


class Job:
    """A job whose driver is a process of its own."""

    def __init__(self, directory, address, num_rows=60, workers=None, model=None, **limits):
        self.output = directory / "out"
        self.address = address
        prompts = directory / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"q {i}"}) + "\n" for i in range(num_rows))
        )
        tree = {
            "input": {"path": str(prompts), "prompt": "prompt"},
            "output": {"path": str(self.output), "unit_rows": 3},
            "model": {"target": "scripted"} | (model or {}),
            "decoding": {"max_new_tokens": 40},
            "workers": workers or {"count": 2},
            "limits": limits,
        }
        self.file = directory / "job.yaml"
        self.file.write_text(json.dumps(tree))

    def start(self, step_seconds, *options):
        return subprocess.Popen(
            [sys.executable, TESTS / "scripted_driver.py", self.file, str(step_seconds), *options],
            env=os.environ | SOON | {"RAY_ADDRESS": self.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, driver, code=0):
        """What a driver wrote until its end; one that does not end is ended."""
        try:
            out, err = driver.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            driver.kill()
            out, err = driver.communicate()
        assert driver.returncode == code, err
        return out + err

    def workers(self):
        invocations = read_json(self.output / "run.json").get("invocations", [])
        return invocations[-1]["workers"] if invocations else []

    def wait_for_units(self, count):
        data = self.output / "data"
        wait_until(lambda: data.is_dir() and len(list(data.iterdir())) >= count)

    def check(self):
        prove_complete(self.output, load_plan(self.output))


def log_of(job, pattern):
    return "".join(p.read_text() for p in sorted((job.output / "_bastion/logs").glob(pattern)))
