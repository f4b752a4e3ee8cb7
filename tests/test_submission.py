"""What `submit` sends: absolute paths, no credentials, and nothing that the job reads in place."""

import json
import shlex
from pathlib import Path

import pytest

from bastion_batch.cluster.ray_jobs import RayJobs, _Lines
from bastion_batch.cluster.submission import OUTPUT_KEY, make_submission
from bastion_batch.config import load_job
from bastion_batch.errors import InputError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job file in a directory of its own, typed from the directory above."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    write_job("jobs/job.yaml")
    return "jobs/job.yaml"


def write_job(path, **changes):
    tree = {
        "name": "mine",
        "input": {"path": "prompts/*.jsonl", "prompt": "prompt"},
        "output": {"path": "out/answers"},
        "model": {"target": "smollm2-135m-instruct"},
    }
    for section, fields in changes.items():
        tree[section] |= fields
    Path(path).write_text(json.dumps(tree))


def settings(submission):
    words = shlex.split(submission.entrypoint)
    assert words[:4] == ["python", "-m", "bastion_batch.cli", "run"]
    return words[4], [value for flag, value in zip(words[5::2], words[6::2], strict=True)]


def test_paths_are_absolute_where_they_were_typed(job, tmp_path):
    submission = make_submission(job, ["decoding.seed=3"])
    file, overrides = settings(submission)
    assert file == "jobs/job.yaml"
    assert overrides == [
        "decoding.seed=3",
        f'input.path="{tmp_path}/prompts/*.jsonl"',
        f'output.path="{tmp_path}/out/answers"',
    ]
    there = load_job(job, overrides)
    assert there.output.path == submission.output == f"{tmp_path}/out/answers"
    assert there.decoding.seed == 3
    assert submission.metadata == {OUTPUT_KEY: submission.output, "bastion_batch_name": "mine"}


def test_awkward_names_survive_the_shell_and_yaml(job, tmp_path):
    Path("jobs/job 2.yaml").write_text(Path(job).read_text())
    name = "out/it's: a #1 $HOME"
    submission = make_submission("jobs/job 2.yaml", [f"output.path={json.dumps(name)}"])
    file, overrides = settings(submission)
    assert file == "jobs/job 2.yaml"
    assert load_job(file, overrides).output.path == f"{tmp_path}/{name}"


def test_several_inputs_and_a_target_directory(job, tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    write_job(job, input={"path": ["a.jsonl", "b.jsonl"]}, model={"target": "models/mine"})
    submission = make_submission(job, [])
    there = load_job(job, settings(submission)[1])
    assert there.input.paths == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    assert there.model.target == f"{tmp_path}/models/mine"
    excluded = submission.runtime_env["excludes"]
    assert {"/a.jsonl", "/b.jsonl", "/out/answers", "/models/mine", ".git/"} <= set(excluded)


def test_urls_stay_in_the_job_file(job):
    write_job(job, output={"path": "s3://key:secret@bucket/answers"})
    submission = make_submission(job, [])
    assert not any(value.startswith("output") for value in settings(submission)[1])
    shown = json.dumps([submission.entrypoint, submission.metadata])
    assert "secret" not in shown
    assert submission.metadata[OUTPUT_KEY] == "s3://bucket/answers"


@pytest.mark.parametrize(
    "override",
    [
        "output.storage_options={key: abc}",
        "output={path: x, storage_options: {key: abc}}",
        "input.path=s3://key:abc@bucket/x",
    ],
)
def test_credentials_on_the_command_line_are_refused(job, override):
    with pytest.raises(InputError, match="list of jobs") as refused:
        make_submission(job, [override])
    assert "abc" not in str(refused.value)


def test_variables_travel_by_name(job, monkeypatch):
    write_job(job, output={"path": "${BB_PLACE}/answers", "storage_options": {"key": "${BB_KEY}"}})
    monkeypatch.setenv("BB_PLACE", "s3://bucket")
    monkeypatch.setenv("BB_KEY", "abc")
    submission = make_submission(job, [], variables=["BB_KEY"])
    env = {"RAY_JOB_STOP_WAIT_TIME_S": "60", "BB_KEY": "abc"}
    assert submission.runtime_env["env_vars"] == env
    assert submission.unset == ("BB_PLACE",)
    assert "abc" not in submission.entrypoint + json.dumps(submission.metadata)
    with pytest.raises(InputError, match="--env NO_SUCH: the environment has no such variable"):
        make_submission(job, [], variables=["NO_SUCH"])


def test_a_job_file_outside_the_working_directory_is_refused(job, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match="not in the working directory"):
        make_submission(job, [], working_dir="elsewhere")
    assert settings(make_submission(job, [], working_dir="jobs"))[0] == "job.yaml"


def test_an_address_that_is_no_dashboard_is_refused():
    for address in ("ray://head:10001", "head:6379"):
        with pytest.raises(InputError, match="not that of a dashboard"):
            RayJobs(address)


def test_a_log_is_written_once_in_whole_lines_without_carriage_returns():
    written = []
    lines = _Lines(written.append)
    for piece in ("one\ntw", "o\r\n10%\r5", "0%\rdone\nla"):
        lines.add(piece)
    lines.rewind()  # the stream broke off and begins again
    for piece in ("one\ntwo\r\n10%\r50%\rdo", "ne\nlast"):
        lines.add(piece)
    assert written == ["one", "two", "done"]
    lines.close()
    assert written == ["one", "two", "done", "last"]
