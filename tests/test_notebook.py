"""The notebook runs as a script on a real output, and draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from io_jobs import planned, run_all

ROOT = Path(__file__).parents[1]


def run_notebook(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "notebooks/quickstart.py", "--", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("steps", ["all", "off"])
def test_draws_a_finished_output(tmp_path, steps):
    plan = planned(tmp_path, output__unit_rows=4, output__steps=steps)
    run_all(tmp_path / "out", plan)
    done = run_notebook("--output", tmp_path / "out", "--save", tmp_path / "pictures")
    assert done.returncode == 0, done.stderr
    pictures = {path.stem: path.stat().st_size for path in (tmp_path / "pictures").iterdir()}
    assert pictures.keys() == {"tokens_per_step", "budget", "acceptance", "time"}
    assert min(pictures.values()) > 2_000


def test_says_what_is_missing(tmp_path):
    done = run_notebook("--output", tmp_path / "nothing", "--save", tmp_path / "pictures")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pictures").exists()
