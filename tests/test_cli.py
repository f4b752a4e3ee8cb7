"""The command line: exit codes, one-line errors, and a whole job on a tiny real model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiny_checkpoint import save_tiny_checkpoint

import bastion_batch
from bastion_batch.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path, model, monkeypatch):
    """A job file in the current directory, with relative paths."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"question {i}"} for i in range(10)]
    rows[3] = {"prompt": None}
    rows[4] = {"prompt": "x" * 1000}
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("job.yaml").write_text(
        json.dumps(
            {
                "input": {"path": "prompts.jsonl", "prompt": "prompt"},
                "output": {"path": "out"},
                "model": {"target": str(model), "drafter": None, "dtype": "float32"},
                "decoding": {"max_new_tokens": 8},
            }
        )
    )
    return "job.yaml"


def command(*arguments):
    """Run the command line in a process of its own, in the current directory."""
    return subprocess.run(
        [sys.executable, "-m", "bastion_batch.cli", *arguments],
        env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bastion-batch {bastion_batch.__version__}\n"


@pytest.mark.parametrize("arguments", [["run"], ["no-such-command"], ["run", "a", "--bogus"]])
def test_misuse_is_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("run", "plan", "report", "status", "verify"),
        *("retry-failed", "compact", "submit", "stop"),
    ],
)
def test_every_command_explains_itself(name, capsys):
    assert main([name, "--help"]) == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["input.path=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["input.path=empty.jsonl"], "empty.jsonl is empty"),
        (["input.prompt=question"], "no column 'question'"),
        (["input.promt=x"], "did you mean 'prompt'"),
        (["decoding.temperature=-1"], "decoding.temperature"),
        (["workers.pools=[{}]", "workers.pools.1.count=2"], "'1' is none of the 1 in the list"),
        (["workers.pools=[{}]", "workers.pools.0.cuont=2"], "did you mean 'count'"),
        (["model.target=no-such-model"], "no-such-model"),
        (["model.drafter=no-such-drafter"], "no-such-drafter"),
    ],
)
@pytest.mark.parametrize("name", ["run", "plan"])
def test_bad_input_is_one_line_and_exit_code_2(job, name, overrides, message, capsys):
    Path("empty.jsonl").touch()
    options = [part for override in overrides for part in ("--set", override)]
    assert main([name, job, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not Path("out").exists()


def test_an_output_that_cannot_be_a_directory_is_refused(job, capsys):
    assert main(["run", job, "--set", "output.path=prompts.jsonl"]) == 2
    assert "prompts.jsonl cannot be written" in capsys.readouterr().err


def test_plan_shows_size_and_prompts_and_writes_nothing(job, capsys):
    before = sorted(Path.cwd().rglob("*"))
    assert main(["plan", job]) == 0
    out = capsys.readouterr().out
    assert "10 rows in 1 file: prompts.jsonl" in out
    assert "f00000-000000000000\nquestion 0" in out
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["report"], ["status"], ["verify"], ["retry-failed"], ["compact", "dest"]]
)
def test_something_that_is_no_output_is_refused(tmp_path, monkeypatch, arguments, capsys):
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    assert main([name, str(tmp_path / "nothing"), *rest]) == 2
    assert "nothing holds no job" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_job_file_may_be_named_for_its_output(job, capsys):
    assert main(["verify", job]) == 2
    assert f"{Path('out').absolute()} holds no job" in capsys.readouterr().err
    assert main(["verify", "out", "--set", "input.path=x"]) == 2
    assert "--set changes a job file" in capsys.readouterr().err


@pytest.mark.ray
def test_a_job_with_too_many_failed_rows_is_finished_and_exits_3(job, capsys):
    ended = command("run", job)
    assert ended.returncode == 3, ended.stderr
    assert "2 of 10 rows failed; limits.max_failed is 1%" in ended.stderr
    assert "failed rows      2 (1 null_prompt, 1 prompt_too_long)" in ended.stdout
    assert "Traceback" not in ended.stderr
    rows = pq.read_table("out/data").to_pylist()
    assert [row["finish_reason"] == "error" for row in rows] == [i in (3, 4) for i in range(10)]

    assert main(["report", "out"]) == 0
    assert capsys.readouterr().out == ended.stdout
    assert main(["verify", "out"]) == 0
    assert capsys.readouterr().out.endswith("\nclean\n")

    again = command("retry-failed", "out", "--kind", "prompt_too_long")
    assert again.returncode == 3, again.stderr  # it is too long as it ever was
    assert "failed rows      2 (1 null_prompt, 1 prompt_too_long)" in again.stdout
    assert pq.read_table("out/data").to_pylist() == [
        row | {"worker": new["worker"]}
        for row, new in zip(rows, pq.read_table("out/data").to_pylist(), strict=True)
    ]
    assert main(["verify", "out"]) == 0
    assert main(["status", job]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["compact", "out", "compact"]) == 0
    assert pq.read_table("compact/data").num_rows == 10
    assert main(["run", job, "--set", "limits.max_failed=2"]) == 0
    assert main(["run", job, "--set", "decoding.seed=1"]) == 2
    assert "decoding.seed: 0 -> 1" in capsys.readouterr().err


def test_importing_the_package_is_cheap():
    program = (
        "import sys, bastion_batch, bastion_batch.cli\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_public_names_are_exactly_these():
    assert bastion_batch.__all__ == [
        "Engine",
        "JobConfig",
        "JobResult",
        "__version__",
        "load_job",
        "load_steps",
        "run",
    ]
    assert dir(bastion_batch) == sorted(bastion_batch.__all__)
    for name in bastion_batch.__all__:
        assert getattr(bastion_batch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bastion_batch.nothing  # noqa: B018
