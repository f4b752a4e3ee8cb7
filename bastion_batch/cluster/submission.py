"""What is sent to a cluster to run a job there: a command, a working directory, an environment.

Local paths are made absolute here, where the user typed them, because the command runs in Ray's
copy of the working directory, which is deleted with the job. What a cluster shows to everyone, the
command and the metadata, never carries a credential: those stay in the job file as `${VAR}`, and
the variables travel in the environment.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bastion_batch.config import JobConfig, load_job
from bastion_batch.errors import InputError
from bastion_batch.run_record import redacted

STOP_WAIT_SECONDS = 60
"""How long Ray lets the driver end by itself after a stop; its own default is 3 s."""

OUTPUT_KEY = "bastion_batch_output"
"""In a job's metadata: its output, by which `stop` finds it."""

_ALWAYS_EXCLUDED = (".git/", ".venv/", "__pycache__/")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class Submission(NamedTuple):
    """Arguments of Ray's `submit_job`."""

    entrypoint: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str]
    output: str
    """Where the answers will be."""
    unset: tuple[str, ...]
    """Variables that the job file names and that do not travel: the cluster must have them."""


def make_submission(
    job_file: str,
    overrides: Sequence[str],
    *,
    working_dir: str | Path = ".",
    excludes: Sequence[str] = (),
    variables: Sequence[str] = (),
    stop_wait_seconds: int = STOP_WAIT_SECONDS,
    python: str = "python",
) -> Submission:
    """Check a job file and make what is to be submitted.

    Args:
        job_file: in the working directory, whose copy the cluster gets.
        overrides: of its fields, as `section.field=value`.
        working_dir: what travels, without what its .gitignore and .rayignore exclude.
        excludes: patterns of more that does not travel.
        variables: names of environment variables that do.
        stop_wait_seconds: how long a stop waits for the driver.
        python: the interpreter, as the cluster knows it.

    Raises:
        InputError: naming what is wrong.
    """
    directory = Path(working_dir).absolute()
    _refuse_secrets(overrides)
    written = load_job(job_file, overrides)
    job = written.with_absolute_paths(Path.cwd())
    resolved = [f"{name}={json.dumps(value)}" for name, value in _resolved(written, job)]
    settings = [part for override in (*overrides, *resolved) for part in ("--set", override)]
    command = [python, "-m", "bastion_batch.cli", "run", _inside(job_file, directory), *settings]
    named = set(_VARIABLE.findall(Path(job_file).read_text(encoding="utf-8")))
    return Submission(
        entrypoint=shlex.join(command),
        runtime_env={
            "working_dir": str(directory),
            "excludes": [*_ALWAYS_EXCLUDED, *_read_in_place(job, directory), *excludes],
            "env_vars": _environment(variables, stop_wait_seconds),
        },
        metadata={OUTPUT_KEY: redacted(job.output.path), "bastion_batch_name": job.name},
        output=job.output.path,
        unset=tuple(sorted(named.difference(variables))),
    )


def _refuse_secrets(overrides: Iterable[str]) -> None:
    for override in overrides:
        name = override.partition("=")[0]
        if "storage_options" in override or re.search(r"://[^/@\s]+@", override):
            raise InputError(
                f"--set {name}: it would show in the cluster's list of jobs; write ${{VARIABLE}} "
                "into the job file, and give its name by --env"
            )


def _inside(job_file: str, directory: Path) -> str:
    try:
        return Path(job_file).absolute().relative_to(directory).as_posix()
    except ValueError:
        raise InputError(
            f"job file {job_file} is not in the working directory {directory}, whose copy the "
            "cluster gets; give --working-dir"
        ) from None


def _resolved(written: JobConfig, job: JobConfig) -> Iterator[tuple[str, Any]]:
    """Fields that name local paths, made absolute. URLs stay as they are in the job file."""
    if not any("://" in path for path in job.input.paths):
        yield "input.path", job.input.path
    if "://" not in job.output.path:
        yield "output.path", job.output.path
    if job.model.target != written.model.target:
        yield "model.target", job.model.target
    if job.model.drafter != written.model.drafter:
        yield "model.drafter", job.model.drafter
    if job.workers.profiles != written.workers.profiles:
        yield "workers.profiles", job.workers.profiles


def _read_in_place(job: JobConfig, directory: Path) -> Iterator[str]:
    """Patterns of what the job reads and writes by absolute path, and so need not travel."""
    for path in (*job.input.paths, job.output.path, job.model.target, job.model.drafter or ""):
        if Path(path).is_absolute() and Path(path).is_relative_to(directory):
            yield f"/{Path(path).relative_to(directory).as_posix()}"


def _environment(variables: Iterable[str], stop_wait_seconds: int) -> dict[str, str]:
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise InputError(f"--env {missing[0]}: the environment has no such variable")
    given = {name: os.environ[name] for name in variables}
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_seconds), **given}
