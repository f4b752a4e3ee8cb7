"""The command line, and the only place that writes to the terminal.

Errors of a known kind are one line on stderr, never a traceback. Exit codes: 0 done, 1 the job
failed, 2 bad input or refused, 3 finished with too many failed rows, 130 SIGINT, 143 SIGTERM.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from bastion_batch import __version__
from bastion_batch.cli import clusters, jobs, measurements, outputs, training
from bastion_batch.errors import BastionError

app = typer.Typer(
    name="bastion-batch",
    help="A dataset of prompts in, a dataset of completions out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (
    *(jobs.run, jobs.plan),
    *(outputs.report, outputs.status, outputs.verify),
    *(jobs.retry_failed, outputs.compact),
    *(clusters.submit, clusters.stop),
    *(measurements.calibrate, measurements.bench, training.train_drafter),
):
    app.command()(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        app(args=None if arguments is None else list(arguments))
    except BastionError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:  # storage fails, which no command can mend
        typer.echo(f"error: {error}", err=True)
        return 1
    except SystemExit as end:  # how typer ends, whatever the outcome
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(f"bastion-batch {__version__}")
        raise typer.Exit
