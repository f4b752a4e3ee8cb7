"""The command line, and the only place that writes to the terminal.

Errors of a known kind are one line on stderr, never a traceback. Exit codes: 0 done, 1 the job
failed, 2 bad input or refused, 3 finished with too many failed rows, 130 SIGINT, 143 SIGTERM.
"""

import json
import logging
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bastion_batch import __version__
from bastion_batch.config import load_job
from bastion_batch.errors import BastionError, InputError, TooManyFailedRows

app = typer.Typer(
    name="bastion-batch",
    help="A dataset of prompts in, a dataset of completions out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="The job file (YAML).")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."
    ),
]
OutputDir = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output directory of a job.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        app(args=None if arguments is None else list(arguments))
    except BastionError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
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


@app.command()
def run(job: JobFile, overrides: Overrides = []) -> None:  # noqa: B006 - typer's way
    """Run a job, or continue it: the same command finishes what an earlier one began."""
    from bastion_batch.cluster.run import run as run_job
    from bastion_batch.progress import display_for
    from bastion_batch.report import load_result, table

    config = load_job(job, overrides)
    display = display_for(sys.stderr)
    try:
        with _warnings_to(display.say):
            result = run_job(config, display=display)
    except TooManyFailedRows:
        display.close()
        typer.echo(table(load_result(config.with_absolute_paths(Path.cwd()).output.path)))
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        display.say(f"stopped; to go on: {_this_command()}")
        raise SystemExit(_exit_code(stop)) from None
    finally:
        display.close()
    typer.echo(table(result))


@app.command()
def plan(job: JobFile, overrides: Overrides = []) -> None:  # noqa: B006 - typer's way
    """Check a job and show its size and first prompts. Writes nothing."""
    from bastion_batch.preview import describe_plan

    config = load_job(job, overrides).with_absolute_paths(Path.cwd())
    with _warnings_to(lambda line: typer.echo(line, err=True)):
        typer.echo(describe_plan(config))


@app.command()
def report(output: OutputDir) -> None:
    """Show the end table of an output, recomputed from its files."""
    from bastion_batch.report import load_result, table

    typer.echo(table(load_result(Path(output).absolute())))


@app.command()
def calibrate(
    target: Annotated[str, typer.Option(help="Target model.")] = "smollm2-135m-instruct",
    drafter: Annotated[str, typer.Option(help="Drafter; none to leave it out.")] = "default",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if left out.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="15 seconds instead of 60, as an engine at its start.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Time on a busy machine too.")] = False,
) -> None:
    """Time the passes of an engine and keep what was fitted. The last line of output is JSON."""
    from bastion_batch.bench.setup import refuse_loaded_machine
    from bastion_batch.engine.calibration import CalibrationConfig, run_calibration, table

    config = CalibrationConfig(
        target=target,
        drafter=None if drafter == "none" else drafter,
        dtype=dtype,
        threads=threads,
        device=device,
        thorough=not quick,
    )
    if not force:
        refuse_loaded_machine()
    with _warnings_to(_say):
        report = run_calibration(config)
    typer.echo(table(report))
    typer.echo(json.dumps(report))


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="Target model.")] = "smollm2-135m-instruct",
    drafter: Annotated[str, typer.Option(help="Drafter.")] = "default",
    prompts: Annotated[Path, typer.Option(help="JSON lines with a field `prompt`.")] = Path(
        "jobs/data/prompts.jsonl"
    ),
    measure: Annotated[
        str, typer.Option(help="methods, useless, overhead, flatness or peers.")
    ] = "methods",
    methods: Annotated[
        str, typer.Option(help="Of ar, dflash, ddtree and bastion, comma-separated.")
    ] = "ar,dflash,ddtree,bastion",
    batch: Annotated[str, typer.Option(help="Rows decoded together: one number or several.")] = "1",
    seconds: Annotated[float, typer.Option(help="For each batch size.", min=1)] = 360.0,
    quick: Annotated[bool, typer.Option("--quick", help="30 seconds for each, to look.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each row.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if left out.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for a file per batch size and the picture.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Record texts and marginals here, for --replay.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Replay a recording, by the costs of --costs.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="A report of the methods, or a directory of them.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Time on a busy machine too.")] = False,
) -> None:
    """Time the methods side by side on the same live rows. The last line of output is JSON."""
    if replay is not None:
        _bench_replay(replay, costs)
        return
    from bastion_batch.bench.run import run_bench, run_record, table
    from bastion_batch.bench.setup import QUICK_SECONDS, BenchConfig, refuse_loaded_machine

    config = BenchConfig(
        target=target,
        drafter=drafter,
        prompts=prompts,
        methods=_names(methods),
        batches=_sizes(batch),
        seconds=QUICK_SECONDS if quick else seconds,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        threads=threads,
    )
    if record is not None:
        typer.echo(json.dumps(run_record(config, record, _say)))
        return
    if not force:
        refuse_loaded_machine()
    report = run_bench(config, measure, out, _say)
    typer.echo(table(report))
    typer.echo(json.dumps(report))


def _bench_replay(recorded: Path, costs: Path | None) -> None:
    from bastion_batch.bench.recording import load
    from bastion_batch.bench.replayed import read_costs, replay_all, replay_table

    if costs is None:
        raise InputError("--replay needs --costs: a report of the methods, or a directory of them")
    report = replay_all(load(recorded), read_costs(costs), _say)
    typer.echo(replay_table(report))
    typer.echo(json.dumps(report))


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise InputError(f"--batch {text}: numbers, comma-separated") from None


class _SayHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Generator[None]:
    """Show this package's warnings among the other lines."""
    handler = _SayHandler(say)
    package = logging.getLogger("bastion_batch")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


def _exit_code(stop: KeyboardInterrupt | SystemExit) -> int:
    """130 for SIGINT, which typer would make 1."""
    return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130


def _this_command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
