"""`train-drafter`: from prompts to a drafter that is better, in spite of being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from io_jobs import write_jsonl
from safetensors.torch import load_file
from training_data import MASK, curve_of, prompt_rows, write_output, write_target

from bastion_batch.cli import main
from bastion_batch.engine.device import pick_dtype
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.target import Target
from bastion_batch.training.run import TrainingRun, _about, _plan
from bastion_batch.training.settings import Recipe, Schedule
from bastion_batch.training.state import STATE, RunFiles
from bastion_batch.training.texts import TextFiles

STEPS = 100


class Bench:
    """A target, completions of it, and commands on them."""

    def __init__(self, directory: Path) -> None:
        self.target = write_target(directory / "target")
        self.output = write_output(directory / "data", self.target, 120, 32)
        self.held_out = write_jsonl(directory / "held-out.jsonl", prompt_rows(8, first=5000))

    def arguments(self, out: Path, **changes: object) -> list[str]:
        options = {
            "target": self.target, "data": self.output, "out": out, "held-out": self.held_out,
            "num-held-out": 8, "mask-token-id": MASK, "layers": 1, "block-size": 6,
            "learning-rate": 8e-3, "steps": STEPS, "sequences": 8, "anchors": 10,
            "check-every": STEPS // 2, "save-every": 5, "check-tokens": 24, "tree-nodes": 16,
            "dtype": "float32", "threads": 1,
        }  # fmt: skip
        given = {**options, **{k.replace("_", "-"): v for k, v in changes.items()}}
        words = [(f"--{k}", str(v)) for k, v in given.items() if v is not None]
        return ["train-drafter", *(word for pair in words for word in pair)]

    def start(self, out: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "bastion_batch.cli", *self.arguments(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def trained(bench, tmp_path_factory):
    """A drafter that was trained without interruption."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    assert main(bench.arguments(out)) == 0
    return out


def test_tokens_per_step_rise_well_above_an_untrained_drafters(trained):
    untrained, *_, last = curve_of(trained)
    assert untrained["step"] == 0
    assert last["chain"] > 1.4 * untrained["chain"]
    assert last["tree"] > 1.4 * untrained["tree"]
    assert last["tree"] > last["chain"]


def test_a_killed_run_goes_on_to_the_very_same_drafter(bench, trained, tmp_path):
    """SIGKILL at any moment: the steps after it are those that would have come."""
    out = tmp_path / "drafter"
    state = out / "training" / STATE
    process = bench.start(out)
    deadline = time.monotonic() + 100
    while not state.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 0 < RunFiles(out).progress().step < STEPS
    assert main(bench.arguments(out)) == 0
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (trained / name).read_bytes()
    points = [[{**p, "seconds": 0} for p in curve_of(path)] for path in (out, trained)]
    assert points[0] == points[1]


def test_the_drafter_loads_here_and_in_zlabs_code(bench, trained):
    target = Target.load(bench.target, torch.float32, torch.device("cpu"))
    assert load_drafter(trained, target).depth == 5
    reference = pytest.importorskip("dflash.model")
    theirs = reference.DFlashDraftModel.from_pretrained(trained)
    saved = load_file(trained / "model.safetensors")
    assert theirs.state_dict().keys() == saved.keys()
    assert all(torch.equal(theirs.state_dict()[name], value) for name, value in saved.items())


def test_training_goes_on_from_a_drafter_and_stops_when_it_gets_no_better(
    bench, trained, tmp_path, capsys
):
    options = {
        "from": trained, "layers": None, "block-size": None, "mask-token-id": None, "steps": 60,
        "learning-rate": 1e-9, "check-every": 2, "patience": 1, "num-held-out": 4,
    }  # fmt: skip
    assert main(bench.arguments(tmp_path / "next", **options)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] < 60
    assert report["best_step"] == 0
    before, after = (load_file(p / "model.safetensors") for p in (trained, tmp_path / "next"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("teacher_share", [0, 1])
def test_later_slots_may_weigh_nothing_and_labels_be_of_one_kind(bench, tmp_path, teacher_share):
    options = {"steps": 2, "decay": 0.01, "num_held_out": 1, "check_tokens": 2}
    arguments = bench.arguments(tmp_path / "out", teacher_share=teacher_share, **options)
    assert main(arguments) == 0
    assert RunFiles(tmp_path / "out").progress().step == 2


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_does_harm(bench, tmp_path, capsys):
    out = tmp_path / "out"
    options = {"learning_rate": 1e30, "num_held_out": 1, "check_tokens": 2, "save_every": 1}
    assert main(bench.arguments(out, **options)) == 1
    message = capsys.readouterr().err
    assert "the gradient is not finite" in message
    assert "--learning-rate" in message
    assert "--out" in message
    assert "Traceback" not in message
    step = RunFiles(out).progress().step
    assert f"step {step + 1}: " in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_told_by_the_dtype_that_its_features_have(bench, tmp_path, dtype):
    run = TrainingRun(
        target=str(bench.target),
        completions=(),
        out=tmp_path,
        mask_token_id=MASK,
        dtype=dtype,
        device="cpu",
        recipe=Recipe(),
        schedule=Schedule(),
    )
    about = _about(run, _plan(run), TextFiles([], 0), 0, 0)
    assert about["dtype"] == f"torch.{dtype}"
    automatic = _about(replace(run, dtype="auto"), _plan(run), TextFiles([], 0), 0, 0)
    assert automatic["dtype"] == str(pick_dtype("auto", torch.device("cpu")))


def test_other_settings_in_the_same_directory_are_refused(bench, trained, capsys):
    assert main(bench.arguments(trained, decay=2.0)) == 2
    assert "recipe: " in capsys.readouterr().err


def test_two_runs_in_one_directory_are_refused(bench, trained, capsys):
    with RunFiles(trained).held():
        assert main(bench.arguments(trained)) == 2
    assert "another training run writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": "0,7"}, "taps are [0, 7]"),
        ({"taps": "a"}, "--taps a"),
        ({"mask_token_id": 9999}, "mask token id is 9999"),
        ({"mask_token_id": None}, "--mask-token-id"),
        ({"block_size": 1}, "block size is 1"),
        ({"decay": 0}, "decay is 0"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"device": "tpu"}, "--device tpu"),
        ({"target": "no-such-model"}, "no-such-model"),
        ({"from": "default"}, "no built-in drafter"),
        ({"data": "/no/such/file.jsonl"}, "/no/such/file.jsonl"),
        ({"held_out": "/no/such/file.jsonl"}, "/no/such/file.jsonl"),
    ],
)
def test_bad_options_are_refused_in_one_line(bench, tmp_path, capsys, changes, message):
    assert main(bench.arguments(tmp_path / "out", **changes)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.ray
@pytest.mark.slow
def test_prompts_are_answered_first(bench, tmp_path, monkeypatch):
    """The whole command: prompts in, drafter out."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(24))
    out = tmp_path / "drafter"
    options = {"data": prompts, "steps": 4, "check-every": 4, "max-new-tokens": 16}
    assert main(bench.arguments(out, **options)) == 0
    assert (out / "model.safetensors").exists()
    assert len(list((out / "completions" / "data").glob("*.parquet"))) >= 1
