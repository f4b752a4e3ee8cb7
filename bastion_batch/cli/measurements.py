"""Commands that time engines."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bastion_batch.cli.terminal import say, warnings_to
from bastion_batch.errors import InputError

if TYPE_CHECKING:
    from bastion_batch.bench.setup import BenchConfig


_Target = Annotated[str, typer.Option(help="Target model.")]
_Drafter = Annotated[str, typer.Option(help="Drafter.")]
_Prompts = Annotated[
    Path, typer.Option(help="JSON lines with a field `prompt`, perhaps `kind`; .gz too.")
]
_NumPrompts = Annotated[int, typer.Option(help="The first ones of the file.", min=1)]
_Measure = Annotated[
    str,
    typer.Option(
        help="methods, useless, overhead, flatness, prediction, peers, balance or drafter."
    ),
]
_Methods = Annotated[str, typer.Option(help="Of ar, dflash, ddtree and bastion, comma-separated.")]
_Batch = Annotated[str, typer.Option(help="Rows decoded together: one number or several.")]
_Seconds = Annotated[float, typer.Option(help="For each batch size.", min=1)]
_Quick = Annotated[bool, typer.Option("--quick", help="30 seconds for each, to look.")]
_MaxNewTokens = Annotated[int, typer.Option(help="Tokens of each row.", min=1)]
_Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0)]
_Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
_Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores if left out.")]
_Out = Annotated[
    Path | None,
    typer.Option(help="Directory for the report: a file per batch size, and the picture."),
]
_Record = Annotated[
    Path | None, typer.Option(help="Record texts and marginals here, for --replay.")
]
_Replay = Annotated[Path | None, typer.Option(help="Replay a recording, by the costs of --costs.")]
_Costs = Annotated[
    Path | None, typer.Option(help="A report of the methods, or a directory of them.")
]
_Simulate = Annotated[
    bool, typer.Option("--simulate", help="Compare schedulers on a simulated cluster instead.")
]
_Rows = Annotated[int, typer.Option(help="Rows of a simulated job.")]
_Sigma = Annotated[str, typer.Option(help="Spread of log output length; several.")]
_Share = Annotated[str, typer.Option(help="How much of it is predictable; several.")]
_Seeds = Annotated[int, typer.Option(help="Simulated jobs of each kind.")]
_Force = Annotated[bool, typer.Option("--force", help="Time on a busy machine too.")]


def calibrate(
    target: _Target = "smollm2-135m-instruct",
    drafter: Annotated[str, typer.Option(help="Drafter; none to leave it out.")] = "default",
    dtype: _Dtype = "auto",
    threads: _Threads = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="15 seconds instead of 60, as an engine at its start.")
    ] = False,
    force: _Force = False,
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
    target: _Target = "smollm2-135m-instruct",
    drafter: _Drafter = "default",
    prompts: _Prompts = Path("jobs/data/prompts.jsonl"),
    num_prompts: _NumPrompts = 100,
    measure: _Measure = "methods",
    methods: _Methods = "ar,dflash,ddtree,bastion",
    batch: _Batch = "1",
    seconds: _Seconds = 360.0,
    quick: _Quick = False,
    max_new_tokens: _MaxNewTokens = 256,
    temperature: _Temperature = 0.0,
    dtype: _Dtype = "auto",
    threads: _Threads = None,
    out: _Out = None,
    record: _Record = None,
    replay: _Replay = None,
    costs: _Costs = None,
    simulate: _Simulate = False,
    rows: _Rows = 20_000,
    sigma: _Sigma = "1.0",
    share: _Share = "0.8",
    seeds: _Seeds = 3,
    force: _Force = False,
) -> None:
    """Time the methods side by side on the same live rows. The last line of output is JSON."""
    if simulate:
        _bench_simulation(rows, _numbers("--sigma", sigma), _numbers("--share", share), seeds, out)
        return
    if measure == "balance":
        _bench_balance(target, drafter, prompts, max_new_tokens, out, force)
        return
    if replay is not None:
        _bench_replay(replay, costs)
        return
    from bastion_batch.bench.setup import QUICK_SECONDS, BenchConfig

    config = BenchConfig(
        target=target,
        drafter=drafter,
        prompts=prompts,
        num_prompts=num_prompts,
        methods=_names(methods),
        batches=_sizes(batch),
        seconds=QUICK_SECONDS if quick else seconds,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        threads=threads,
    )
    _bench_live(config, measure, out, record, force)


def _bench_live(
    config: "BenchConfig", measure: str, out: Path | None, record: Path | None, force: bool
) -> None:
    from bastion_batch.bench.run import UNTIMED, run_bench, run_record, table
    from bastion_batch.bench.setup import refuse_loaded_machine

    if record is not None:
        typer.echo(json.dumps(run_record(config, record, say)))
        return
    if not force and measure not in UNTIMED:
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


def _bench_balance(
    target: str, drafter: str, prompts: Path, max_new_tokens: int, out: Path | None, force: bool
) -> None:
    from bastion_batch.bench.balance import BalanceConfig, balance_table, run_balance
    from bastion_batch.bench.setup import refuse_loaded_machine

    config = BalanceConfig(
        target=target, drafter=drafter, prompts=prompts, max_new_tokens=max_new_tokens
    )
    if not force:
        refuse_loaded_machine()
    with warnings_to(say):
        report = run_balance(config, out, say)
    typer.echo(balance_table(report))
    typer.echo(json.dumps(report))


def _bench_simulation(
    rows: int, sigmas: tuple[float, ...], shares: tuple[float, ...], seeds: int, out: Path | None
) -> None:
    from bastion_batch.bench.simulation.compare import SimulationConfig, run_simulation, table

    config = SimulationConfig(num_rows=rows, sigmas=sigmas, shares=shares, num_seeds=seeds)
    report = run_simulation(config, out, say)
    typer.echo(table(report))
    typer.echo(json.dumps(report))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(name) for name in _names(text))
    except ValueError:
        raise InputError(f"{option} {text}: numbers, comma-separated") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise InputError(f"--batch {text}: numbers, comma-separated") from None
