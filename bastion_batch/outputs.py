"""What a command's OUTPUT names: an output by its directory or URL, or the job file that writes it.

A job file says what a path cannot: storage options of output and input, and where the inputs are
now.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bastion_batch.config import JobConfig, OutputConfig, load_job, parse_job
from bastion_batch.errors import InputError, OutputError
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.planning import with_operational
from bastion_batch.io.store import PLAN, open_store
from bastion_batch.run_record import read_record

_JOB_SUFFIXES = (".yaml", ".yml")


class Named(NamedTuple):
    """An output, and the job that was named instead of it, if one was. Paths are absolute."""

    output: OutputConfig
    job: JobConfig | None


def find_output(name: str, overrides: Sequence[str] = ()) -> Named:
    """What this name means, where it was typed.

    Raises:
        InputError: it names a job file that is not one; or there are overrides, but no job file.
    """
    if Path(name).suffix in _JOB_SUFFIXES and not Path(name).is_dir():
        job = load_job(name, overrides).with_absolute_paths(Path.cwd())
        return Named(job.output, job)
    if overrides:
        raise InputError(f"--set changes a job file, and {name} is not one")
    return Named(OutputConfig(path=_absolute(name)), None)


def require_plan(named: Named) -> Plan:
    """The plan of an output; its inputs are where the job says, or where they were planned.

    Raises:
        OutputError: there is no job in this output.
        DataError: the job names other inputs than the planned ones.
    """
    store = open_store(named.output)
    plan = load_plan(store)
    if plan is None:
        raise OutputError(f"{store.root} holds no job: it has no {PLAN}")
    return plan if named.job is None else with_operational(plan, named.job)


def require_job(named: Named) -> JobConfig:
    """The job of an output that has been run: the one named, or the one that `run.json` tells.

    Raises:
        OutputError: there is no job in this output, or no more is known of it.
    """
    require_plan(named)
    if named.job is not None:
        return named.job
    if "://" in named.output.path:
        raise OutputError(
            f"{open_store(named.output).root}: an output does not keep storage options; give the "
            "job file instead"
        )
    record = read_record(named.output)
    if record is None:
        raise OutputError(f"{named.output.path} has no run.json; give the job file instead")
    tree = {**record["job"], "output": {**record["job"]["output"], "path": named.output.path}}
    for section in ("input", "output"):
        tree[section] = {k: v for k, v in tree[section].items() if k != "storage_options"}
    return parse_job(tree, source=f"{named.output.path}/run.json")


def destination_of(path: str, named: Named) -> OutputConfig:
    """A second place: a URL is reached with the output's storage options."""
    options = named.output.storage_options if "://" in path else {}
    return OutputConfig(path=_absolute(path), storage_options=options)


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())
