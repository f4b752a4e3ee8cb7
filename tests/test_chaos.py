"""Real Ray, real files, SIGKILL: twelve jobs on clusters that fall apart, three with a model."""

import json
import time
from random import Random

import pytest
from chaos import (
    REPOSITORY,
    Command,
    is_running,
    live_through,
    require_scripted_text,
    require_whole,
    write_scripted_job,
)
from scripted_driver import wait_until

pytestmark = pytest.mark.ray

NUM_ROWS = 500
GPUS = {"H100": 1, "A100": 2, "RTX-A6000": 1}
"""Imagined GPUs of the nodes beside the head; the engines have no use for them."""
SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_AUTH_MODE": "disabled",
}
"""A killed node refuses to be asked: noticed in seconds. A busy one has time to answer."""


class Nodes:
    """A head and three nodes with GPUs. A node that was killed is replaced after a while."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False}
        self._cluster = Cluster(
            initialize_head=True, head_node_args=head | {"object_store_memory": 80 * 2**20}
        )
        self._nodes = {kind: self._add(kind) for kind in GPUS}

    @property
    def address(self) -> str:
        return self._cluster.address

    def kill_one(self, random: Random) -> None:
        """End a node and all that runs on it, at once."""
        kind = random.choice(sorted(self._nodes))
        self._cluster.remove_node(self._nodes[kind], allow_graceful=False)
        self._nodes[kind] = self._add(kind)

    def close(self) -> None:
        self._cluster.shutdown()

    def _add(self, kind: str):
        return self._cluster.add_node(
            num_cpus=2,
            num_gpus=GPUS[kind],
            labels={"ray.io/accelerator-type": kind},
            object_store_memory=80 * 2**20,
        )


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as environment:
        for name, value in SOON.items():
            environment.setenv(name, value)
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.close()


def run_into_accidents(directory, nodes, seed):
    """One job of 500 rows on four unequal workers."""
    random = Random(seed)
    job = write_scripted_job(directory, NUM_ROWS)
    command = Command(
        [str(REPOSITORY / "tests/scripted_driver.py"), str(job), "0.04"],
        directory / "out",
        RAY_ADDRESS=nodes.address,
    )
    kinds = {
        "worker": lambda: command.kill_worker(random),
        "node": lambda: nodes.kill_one(random),
        "driver": command.kill_driver,
    }
    drawn = random.sample(list(kinds), 3) if seed % 2 else random.choices(list(kinds), k=4)
    try:
        live_through(command, [kinds[kind] for kind in drawn], random)
        pids = command.workers()
        wait_until(lambda: not any(map(is_running, pids)), 15)
    finally:
        command.close()
    require_whole(directory / "out")
    require_scripted_text(directory / "out", NUM_ROWS)


@pytest.mark.parametrize("seed", range(1, 3))
def test_no_row_is_lost_when_a_cluster_falls_apart(tmp_path, nodes, seed):
    run_into_accidents(tmp_path, nodes, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 13))
def test_no_row_is_lost_in_ten_more(tmp_path, nodes, seed):
    run_into_accidents(tmp_path, nodes, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_row_is_lost_of_a_real_model(tmp_path, seed):
    """96 rows of 24 tokens, two workers on CPUs: one is killed, then the driver."""
    random = Random(seed)
    prompts = (REPOSITORY / "jobs/data/prompts.jsonl").read_text().splitlines()[:96]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    job = {
        "input": {"path": str(tmp_path / "prompts.jsonl"), "prompt": "prompt"},
        "output": {"path": str(tmp_path / "out"), "unit_rows": 6},
        "model": {"target": "smollm2-135m-instruct", "probe": "off"},
        "decoding": {"max_new_tokens": 24},
        "workers": {"count": 2, "max_batch": 4, "device": "cpu"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = Command(
        ["-m", "bastion_batch.cli", "run", str(tmp_path / "job.yaml")],
        tmp_path / "out",
        RAY_ADDRESS="local",
    )

    def after_a_while(accident):
        def accident_later():
            time.sleep(random.uniform(0.0, 5.0))
            if not command.is_over():
                accident()

        return accident_later

    accidents = [lambda: command.kill_worker(random), command.kill_driver]
    random.shuffle(accidents)
    try:
        live_through(command, [after_a_while(a) for a in accidents], random)
    finally:
        command.close()
    require_whole(tmp_path / "out")
