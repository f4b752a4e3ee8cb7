"""Pools on a real cluster: machines of several kinds, that come and go while a job runs."""

import pyarrow.parquet as pq
import pytest
from ray_nodes import Job, log_of
from scripted_driver import read_json, wait_until

from bastion_batch.io.plan_file import load_plan
from bastion_batch.status import read_status, status_table

pytestmark = pytest.mark.ray

TYPE = "ray.io/accelerator-type"
H100 = {TYPE: "H100", "device": "NVIDIA-H100-80GB-HBM3"}
A6000_LABELLED_A100 = {TYPE: "A100", "device": "NVIDIA-RTX-A6000"}


def pool(accelerator, dtype, price):
    return {"select": {"accelerator": accelerator}, "dtype": dtype, "price_per_hour": price}


def rows_of(job):
    return pq.read_table(job.output / "data").to_pylist()


def test_a_machine_that_comes_in_mid_run_is_used_as_what_it_is(nodes, tmp_path):
    nodes.add(labels=A6000_LABELLED_A100, num_gpus=1)
    pools = [pool("A100", "float32", 2.0), pool("H100", "bfloat16", 4.0)]
    job = Job(
        tmp_path,
        nodes.cluster.address,
        num_rows=240,
        workers={"pools": pools},
        model={"allow_mixed_dtype": True, "dtype": "float32"},
    )
    driver = job.start(0.05)
    job.wait_for_units(2)
    assert [w["engine"]["pool"] for w in job.workers()] == ["a100"]
    nodes.add(labels=H100, num_gpus=1)
    progress = wait_until(
        lambda: (
            len((p := read_json(job.output / "_bastion/progress.json")).get("workers", ())) == 2
            and all(w["tokens_per_second"] for w in p["workers"])
            and p
        )
    )
    assert [w["price_per_hour"] for w in progress["workers"]] == [2.0, 4.0]
    assert progress["cost"] > 0
    shown = status_table(read_status(job.output, load_plan(job.output), say=lambda line: None))
    assert "NVIDIA-H100-80GB-HBM3" in shown
    output = job.end(driver)
    job.check()
    rows = rows_of(job)
    assert {(row["device"], row["dtype"]) for row in rows if not row["migrations"]} == {
        ("NVIDIA-RTX-A6000", "float32"),
        ("NVIDIA-H100-80GB-HBM3", "bfloat16"),
    }
    assert "no machine now for pool h100 (accelerator H100; one per GPU)" in output
    mismatch = "pool a100 selects A100; the device is NVIDIA-RTX-A6000"
    assert f"worker w0: {mismatch}" in output
    assert f"warning: {mismatch}" in shown
    [invocation] = read_json(job.output / "run.json")["invocations"]
    assert invocation["workers"][0]["engine"]["mismatch"] == mismatch
    assert {p["pool"]: p["cost"] > 0 for p in invocation["pools"]} == {"a100": True, "h100": True}
    assert "tokens per dollar" in output


@pytest.mark.slow
def test_rows_move_from_a_machine_that_will_go(nodes, tmp_path):
    going = nodes.add(labels=A6000_LABELLED_A100, num_gpus=1)
    nodes.add(labels=H100, num_gpus=1)
    job = Job(
        tmp_path,
        nodes.cluster.address,
        num_rows=150,
        workers={"pools": [{"select": {"accelerator": ["A100", "H100"]}}]},
        model={"dtype": "float32"},
    )
    driver = job.start(0.05)
    wait_until(lambda: len(job.workers()) == 2 and all(w["num_units"] for w in job.workers()))
    (job.output / "_bastion/stop").write_text(going)
    wait_until(lambda: "has left its node" in log_of(job, "driver-*"))
    job.end(driver)
    job.check()
    moved = [row for row in rows_of(job) if row["migrations"]]
    assert moved
    assert {row["device"] for row in moved} == {"NVIDIA-H100-80GB-HBM3"}
    left = next(w for w in job.workers() if w["engine"]["device"] == "NVIDIA-RTX-A6000")
    assert left["num_units"] < load_plan(job.output).num_units


def test_pools_that_nothing_can_fill_are_refused_by_name(nodes, tmp_path):
    pools = [{"select": {"accelerator": "L40S"}, "count": 2}]
    job = Job(tmp_path, nodes.cluster.address, workers={"pools": pools})
    output = job.end(job.start(0.0), code=2)
    assert "no machine now for pool l40s (accelerator L40S; 2 workers)" in output
    assert "There are: " in output
