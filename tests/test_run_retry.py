"""`retry-failed` on a real run, interrupted and given again; `verify` and `status` in between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scripted_driver import read_json, wait_until

from bastion_batch.cli import main
from bastion_batch.cluster.scripted import scripted_ids
from bastion_batch.core.noise import row_key
from bastion_batch.records import Request, SamplingParams

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[1]
NUM_ROWS = 24
LONG = (3, 4, 13, 20)
"""Rows whose prompts the first engine does not take."""

PROGRAM = """
import json, sys, time
from bastion_batch.cluster.run import run
from bastion_batch.cluster.scripted import ScriptedEngines
from bastion_batch.config import load_job
file, max_context, max_units, retry = json.loads(sys.argv[1])
begun = []
def wait_after_max_units():
    begun.append(1)
    if max_units is not None and len(begun) > max_units:
        time.sleep(600)
engines = ScriptedEngines(max_batch=2, max_context=max_context)
result = run(
    load_job(file), engines=engines, retry_failed=retry, before_data=wait_after_max_units
)
print(result.num_outputs, result.num_failed)
"""


def start(file, *, max_context=4096, max_units=None, retry=None):
    """A driver in a process of its own, with engines that take prompts below this.

    After `max_units` its worker commits no more: it waits to be killed, and a worker that outlives
    its driver for a moment cannot finish the job meanwhile.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps([str(file), max_context, max_units, retry])],
        env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(driver):
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 0, err
    return out.split()


def prompt(number):
    return f"question {number}" + " and so on" * 10 * (number in LONG)


def num_answered(output):
    return pq.read_table(output / "data")["error_kind"].null_count


def test_failed_rows_are_decoded_again_and_nothing_else_changes(tmp_path, capsys):
    file, output = tmp_path / "job.yaml", tmp_path / "out"
    lines = [json.dumps({"prompt": prompt(i)}) for i in range(NUM_ROWS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    tree = {
        "input": {"path": str(tmp_path / "prompts.jsonl"), "prompt": "prompt"},
        "output": {"path": str(output), "unit_rows": 6},
        "model": {"target": "scripted"},
        "decoding": {"max_new_tokens": 40},
        "workers": {"count": 1},
        "limits": {"max_failed": "100%"},
    }
    file.write_text(json.dumps(tree))
    assert finish(start(file, max_context=60)) == ["24", "4"]
    first = pq.read_table(output / "data").to_pylist()
    failed = [i for i, row in enumerate(first) if row["error_kind"] == "prompt_too_long"]
    assert tuple(failed) == LONG
    assert main(["verify", str(output)]) == 0

    interrupted = start(file, max_units=1, retry=[])
    try:
        wait_until(lambda: num_answered(output) > NUM_ROWS - len(LONG), seconds=120)
    finally:
        interrupted.kill()
        interrupted.communicate()
    capsys.readouterr()
    assert main(["verify", str(output)]) == 0
    assert main(["status", str(output)]) == 0
    assert "the last one killed" in capsys.readouterr().out
    assert num_answered(output) < NUM_ROWS

    assert finish(start(file, retry=["prompt_too_long"])) == ["24", "0"]
    rows = pq.read_table(output / "data").to_pylist()
    for i, row in enumerate(rows):
        if i not in LONG:
            assert row == first[i]
        request = Request(
            row_id=row["row_id"],
            prompt_ids=tuple(prompt(i).encode()),
            sampling=SamplingParams(max_new_tokens=40),
            noise_key=row_key(0, row["row_id"], 0),
        )
        assert row["output"] == bytes(scripted_ids(request)).decode()
    assert read_json(output / "run.json")["totals"]["num_failed"] == 0
    assert main(["verify", str(output)]) == 0
    units_replaced = {i // 6 for i in LONG}
    attempts = [p.name for p in (output / "steps").iterdir() if p.name[:11] != "u00000000-a"]
    assert len(attempts) == 3
    assert len(units_replaced) == 3

    again = start(file, retry=[])
    assert finish(again) == ["24", "0"]
    capsys.readouterr()
    assert main(["status", "--json", str(output)]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "complete"
    assert (status["num_outputs"], status["num_failed"]) == (24, 0)
    assert status["num_invocations"] == 3
    assert status["driver"]["ended"] is True
    assert status["driver_lives"] is False
    assert status["last_invocation"] == "finished"
