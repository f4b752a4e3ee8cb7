"""Commands that run jobs, here."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from bastion_batch.cli.options import JobFile, Output, Overrides, Takeover
from bastion_batch.cli.terminal import command_name, say, warnings_to
from bastion_batch.config import JobConfig, load_job
from bastion_batch.errors import TooManyFailedRows


def run(
    job: JobFile,
    overrides: Overrides = [],  # noqa: B006 - typer's way
    takeover: Takeover = False,
) -> None:
    """Run a job, or continue it: the same command finishes what an earlier one began."""
    run_to_the_end(load_job(job, overrides), takeover=takeover)


def plan(job: JobFile, overrides: Overrides = []) -> None:  # noqa: B006 - typer's way
    """Check a job and show its size and first prompts. Writes nothing."""
    from bastion_batch.preview import describe_plan

    config = load_job(job, overrides).with_absolute_paths(Path.cwd())
    with warnings_to(say):
        typer.echo(describe_plan(config))


def retry_failed(
    output: Output,
    kinds: Annotated[
        list[str],
        typer.Option(
            "--kind", metavar="ERROR_KIND", help="Only these; repeatable. All if left out."
        ),
    ] = [],  # noqa: B006 - typer's way
    overrides: Overrides = [],  # noqa: B006 - typer's way
    takeover: Takeover = False,
) -> None:
    """Decode the failed rows of a complete output again; the other rows stay as they are.

    A unit with such rows is replaced whole, in one step: readers see the old rows or the new. Exit
    codes as of `run`.
    """
    from bastion_batch.outputs import find_output, require_job

    config = require_job(find_output(output, overrides))
    run_to_the_end(config, takeover=takeover, retry_failed=frozenset(kinds))


def run_to_the_end(
    config: JobConfig, *, takeover: bool, retry_failed: frozenset[str] | None = None
) -> None:
    """Run a job with its progress shown, and show the end table."""
    from bastion_batch.cluster.run import run as run_job
    from bastion_batch.progress import display_for
    from bastion_batch.report import load_result, table

    display = display_for(sys.stderr)
    try:
        with warnings_to(display.say):
            result = run_job(config, display=display, takeover=takeover, retry_failed=retry_failed)
    except TooManyFailedRows:
        display.close()
        typer.echo(table(load_result(config.with_absolute_paths(Path.cwd()).output)))
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        display.say(f"stopped; to go on: {how_to_go_on()}")
        raise SystemExit(_exit_code(stop)) from None
    finally:
        display.close()
    typer.echo(table(result))


def _exit_code(stop: KeyboardInterrupt | SystemExit) -> int:
    """130 for SIGINT, which typer would make 1."""
    return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130


def how_to_go_on() -> str:
    """This command again; of a submitted job it names files that are deleted with it."""
    from bastion_batch.cluster.signals import submission_id

    if submission_id(os.environ) is not None:
        return "submit the same job again"
    return shlex.join([command_name(), *sys.argv[1:]])
