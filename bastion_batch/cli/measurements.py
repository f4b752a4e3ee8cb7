"""Commands that time engines."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bastion_batch.cli.terminal import say, warnings_to
from bastion_batch.errors import InputError


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
    with warnings_to(say):
        report = run_calibration(config)
    typer.echo(table(report))
    typer.echo(json.dumps(report))


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
        typer.echo(json.dumps(run_record(config, record, say)))
        return
    if not force:
        refuse_loaded_machine()
    report = run_bench(config, measure, out, say)
    typer.echo(table(report))
    typer.echo(json.dumps(report))


def _bench_replay(recorded: Path, costs: Path | None) -> None:
    from bastion_batch.bench.recording import load
    from bastion_batch.bench.replayed import read_costs, replay_all, replay_table

    if costs is None:
        raise InputError("--replay needs --costs: a report of the methods, or a directory of them")
    report = replay_all(load(recorded), read_costs(costs), say)
    typer.echo(replay_table(report))
    typer.echo(json.dumps(report))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise InputError(f"--batch {text}: numbers, comma-separated") from None
