"""`submit` and `stop`: a job on a cluster is stopped, loses nothing, and ends where asked."""

import json
import re
import shutil
import signal

import pyarrow.parquet as pq
import pytest
from io_jobs import write_jsonl
from ray_head import ROOT, Head
from scripted_driver import wait_until
from tiny_checkpoint import save_tiny_checkpoint
from training_data import MASK, curve_of, prompt_rows, write_target

from bastion_batch.cli import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_ROWS = 80
NUM_UNITS = 20


@pytest.fixture(scope="module")
def head():
    head = Head()
    yield head
    head.stop()


@pytest.fixture
def home(tmp_path):
    """What a user submits from, and where the answers are to come."""
    home = tmp_path / "home"
    shutil.copytree(
        ROOT / "bastion_batch", home / "bastion_batch", ignore=shutil.ignore_patterns("__pycache__")
    )
    (home / "jobs").mkdir()
    rows = [{"prompt": f"question {i}"} for i in range(NUM_ROWS)]
    rows[5] = {"prompt": None}
    (home / "jobs" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tiny_checkpoint(home / "model")
    tree = {
        "input": {"path": "jobs/prompts.jsonl", "prompt": "prompt"},
        "output": {"path": "out/job", "unit_rows": 4},
        "model": {"target": "./model", "drafter": None, "dtype": "float32"},
        "decoding": {"max_new_tokens": 32, "ignore_eos": True},
        "workers": {"max_batch": 1},
        "limits": {"max_failed": 0},
    }
    (home / "jobs" / "job.yaml").write_text(json.dumps(tree))
    return home


def ended(process):
    out, err = process.communicate(timeout=150)
    assert "\r" not in out + err
    assert "Traceback" not in out + err, out + err
    return process.returncode, out, err


class Submissions:
    """One user's job, submitted from `home`."""

    def __init__(self, head, home):
        self.head = head
        self.home = home
        self.output = home / "out" / "job"

    def submit(self, *arguments):
        return self.head.command("submit", "jobs/job.yaml", *arguments, cwd=self.home)

    def stop(self, name):
        code, out, err = ended(self.head.command("stop", name, cwd=self.home))
        assert code == 0, err
        assert re.fullmatch(r"job \w+ ended: STOPPED\n", out)

    def num_units(self):
        data = self.output / "data"
        return len(list(data.iterdir())) if data.is_dir() else 0

    def wait_for_units(self, count, process):
        wait_until(lambda: process.poll() is not None or self.num_units() >= count, seconds=150)
        assert process.poll() is None, process.communicate()


@pytest.fixture
def job(head, home):
    return Submissions(head, home)


def test_a_job_that_is_left_and_stopped_ends_where_it_was_asked_for(job, capsys):
    first = job.submit("--env", "PATH")
    job.wait_for_units(2, first)
    first.send_signal(signal.SIGINT)
    code, out, err = ended(first)
    assert code == 130, err
    assert f"output {job.output}" in out
    assert "the job goes on; to stop it: " in err
    job.stop("out/job")
    assert job.num_units() < NUM_UNITS
    assert main(["verify", str(job.output)]) == 1
    assert "nothing is wrong with what is there" in capsys.readouterr().out

    code, out, err = ended(job.submit())
    assert code == 3, out + err  # one row has no prompt, and none may fail
    assert f"rows             {NUM_ROWS}" in out
    assert main(["verify", str(job.output)]) == 0
    rows = pq.read_table(job.output / "data").to_pylist()
    assert [row["prompt"] is None for row in rows] == [i == 5 for i in range(NUM_ROWS)]
    code, _, err = ended(job.head.command("stop", "out/job", cwd=job.home))
    assert code == 2
    assert "none that writes to" in err


def test_who_follows_a_job_that_is_stopped_is_told_and_the_next_one_finishes(job):
    first = job.submit()
    job.wait_for_units(2, first)
    [job_id] = re.findall(r"^job (\w+)", first.stdout.readline())
    job.stop(job_id)
    code, _, err = ended(first)
    assert code == 143, err
    assert job.num_units() < NUM_UNITS
    code, out, err = ended(job.submit("--set", "limits.max_failed=1"))
    assert code == 0, out + err
    assert main(["verify", str(job.output)]) == 0


def test_what_cannot_be_submitted_is_refused(head, home):
    code, _, err = ended(
        head.command("submit", "jobs/job.yaml", "--set", "input.promt=x", cwd=home)
    )
    assert (code, "did you mean 'prompt'" in err) == (2, True)
    code, _, err = ended(
        head.command("submit", "jobs/job.yaml", "--address", "http://127.0.0.1:9", cwd=home)
    )
    assert (code, "Ray at http://127.0.0.1:9 does not answer" in err) == (2, True)


def test_a_drafter_is_trained_by_a_submitted_job(head, home, tmp_path):
    """The cluster's workers answer the prompts, the job trains, and a second one has nothing to do."""
    shutil.copy(ROOT / "jobs" / "train_drafter.py", home / "jobs")
    options = {
        "--target": write_target(tmp_path / "target"), "--out": tmp_path / "drafter",
        "--data": write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(24)),
        "--mask-token-id": MASK, "--layers": 1, "--block-size": 6, "--max-new-tokens": 16,
        "--steps": 4, "--check-every": 4, "--check-tokens": 16, "--tree-nodes": 16,
        "--dtype": "float32", "--threads": 1,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    first, second = (head.submit(home, *words, script="jobs/train_drafter.py") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert '"steps": 4' in first.stdout
    assert [point["step"] for point in curve_of(tmp_path / "drafter")] == [0, 4]
    assert (tmp_path / "drafter" / "model.safetensors").exists()
    assert len(list((tmp_path / "drafter" / "completions" / "data").glob("*.parquet"))) >= 1
