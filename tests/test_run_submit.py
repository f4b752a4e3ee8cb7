"""Jobs submitted to a cluster of their own on this machine, by the commands of the README."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from ray_head import ROOT, Head
from scripted_driver import read_json
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.results import prove_complete

pytestmark = [pytest.mark.ray, pytest.mark.slow]


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
