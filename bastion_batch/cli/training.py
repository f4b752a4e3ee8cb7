"""The command that trains drafters."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bastion_batch.cli.jobs import how_to_go_on, run_to_the_end
from bastion_batch.cli.terminal import say, warnings_to
from bastion_batch.config import (
    DecodingConfig,
    Device,
    Dtype,
    InputConfig,
    JobConfig,
    ModelConfig,
    OutputConfig,
    WorkersConfig,
)
from bastion_batch.errors import InputError

if TYPE_CHECKING:
    from bastion_batch.training.run import TrainingRun

_GB = 1_000_000_000


def train_drafter(
    target: Annotated[
        str, typer.Option(help="The model to draft for: built-in name, directory or hub id.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            help="What to learn from; repeatable. Prompts (.jsonl, .parquet, directory, glob or URL): the "
            "target answers them first, as a job in OUT/completions. Or the output of a job of "
            "this target: its committed rows are used. While that job commits more, a run cannot go "
            "on: its texts would be others."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Directory of the drafter: config.json and model.safetensors of the best one so "
            "far, curve.json, and what a killed run goes on from. The same command goes on."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Column of the prompts' text.")] = "prompt",
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Prompts to measure on, like --data. Left out: some of --data's texts are kept "
            "from training."
        ),
    ] = None,
    num_held_out: Annotated[int, typer.Option(help="How many are measured on.", min=1)] = 32,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Drafter to go on from: directory, hub id, or default (the built-in one). Left "
            "out: the target's last layers.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub target.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the drafter; 2 if new.")] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Slots of a block: one more than it predicts; 8 if new."),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(
            help="Target layers that feed the drafter, from 0, comma-separated; five spread "
            "evenly if new."
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Token that text cannot contain; a spare special one if new."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 5000,
    sequences: Annotated[int, typer.Option(help="Texts of a step.", min=1)] = 16,
    anchors: Annotated[int, typer.Option(help="Blocks of a text in a step.", min=1)] = 12,
    landing_share: Annotated[
        float,
        typer.Option(
            help="Of the blocks: drawn where decode steps of the drafter begin; the others are "
            "drawn uniformly.",
            min=0,
            max=1,
        ),
    ] = 0.5,
    optimizer: Annotated[
        Literal["muon", "adamw"],
        typer.Option(help="What moves matrices; the rest always goes by adamw."),
    ] = "muon",
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
    warmup_share: Annotated[
        float, typer.Option(help="Of the steps, before the highest learning rate.", min=0, max=1)
    ] = 0.04,
    decay: Annotated[
        float, typer.Option(help="Position j of a block weighs exp(-(j - 1) / DECAY).")
    ] = 4.0,
    teacher_share: Annotated[
        float,
        typer.Option(
            help="Of what a position should predict: the target's own distribution there; the "
            "rest is the text's token.",
            min=0,
            max=1,
        ),
    ] = 0.7,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            help="Compare with so many of the commonest tokens and as many random ones, not with "
            "the whole vocabulary: faster on a CPU.",
            min=1,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the data's order and the anchors.")] = 0,
    check_every: Annotated[
        int, typer.Option(help="Steps between measurements on the held-out prompts.", min=1)
    ] = 500,
    save_every: Annotated[int, typer.Option(help="Steps between saved states.", min=1)] = 100,
    patience: Annotated[
        int, typer.Option(help="Measurements without a better one before it ends.", min=1)
    ] = 6,
    check_tokens: Annotated[
        int, typer.Option(help="New tokens of each held-out prompt.", min=1)
    ] = 128,
    tree_nodes: Annotated[int, typer.Option(help="Of the tree that is measured.", min=1)] = 64,
    cache_gb: Annotated[
        float, typer.Option(help="Disk for the target's taps; others are computed again.", min=0)
    ] = 8.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Of each completion, where --data holds prompts.", min=2)
    ] = 256,
    max_text_tokens: Annotated[
        int, typer.Option(help="Longer texts are cut when they are learnt from.", min=3)
    ] = 1024,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32 or bfloat16.")] = "auto",
    device: Annotated[
        str, typer.Option(help="Of the answers' workers and of the training: auto, cpu or cuda.")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads of each worker and of the training; all cores if left out.", min=1
        ),
    ] = None,
) -> None:
    """Train a DFlash drafter for a target, or go on with it: a killed run loses little.

    Measured by tokens per step of real decoding on held-out prompts, chain and tree. The drafter is
    in z-lab's format: set it as model.drafter of a job, or load it with the package dflash. The
    last line of output is JSON. Exit codes as of `run`.
    """
    from bastion_batch.training.run import TrainingRun
    from bastion_batch.training.settings import Recipe, Schedule

    run = TrainingRun(
        target=_absolute_directory(target),
        revision=revision,
        completions=tuple(OutputConfig(path=_absolute(path)) for path in data),
        held_out=None if held_out is None else _prompts(held_out, prompt),
        num_held_out=num_held_out,
        out=out.expanduser().absolute(),
        start=start and _absolute_directory(start),
        layers=layers,
        block_size=block_size,
        taps=_numbers(taps),
        mask_token_id=mask_token_id,
        recipe=Recipe(
            steps=steps,
            sequences=sequences,
            anchors=anchors,
            landing_share=landing_share,
            optimizer=optimizer,
            learning_rate=learning_rate,
            warmup_share=warmup_share,
            decay=decay,
            teacher_share=teacher_share,
            loss_tokens=loss_tokens,
            max_text_tokens=max_text_tokens,
            seed=seed,
        ),
        schedule=Schedule(
            check_every=check_every,
            save_every=save_every,
            patience=patience,
            check_tokens=check_tokens,
            tree_nodes=tree_nodes,
            cache_bytes=round(cache_gb * _GB),
        ),
        dtype=_dtype(dtype),
        device=device,
    )
    workers = WorkersConfig(device=_device(device), threads=threads or "auto")
    _train(run, InputConfig(path="data", prompt=prompt), workers, max_new_tokens)


def _train(
    run: "TrainingRun", prompts: InputConfig, workers: WorkersConfig, max_new_tokens: int
) -> None:
    """Answer the prompts if need be, train, and say how it ended."""
    import torch

    from bastion_batch.training.run import check_run, train_drafter

    if workers.threads != "auto":
        torch.set_num_threads(workers.threads)
    with warnings_to(say):
        check_run(run)
    run = _with_completions(run, prompts, workers, max_new_tokens)
    try:
        with warnings_to(say):
            progress = train_drafter(run, say)
    except KeyboardInterrupt:
        say(f"stopped; to go on: {how_to_go_on()}")
        raise SystemExit(130) from None
    best = max(progress.curve, key=lambda point: point.chain + point.tree)
    typer.echo(
        json.dumps({"drafter": str(run.out), "steps": progress.step, "best_step": best.step,
                    "chain": best.chain, "tree": best.tree})
    )  # fmt: skip


def _with_completions(
    run: "TrainingRun", prompts: InputConfig, workers: WorkersConfig, max_new_tokens: int
) -> "TrainingRun":
    """The run with completions to learn from: answered now where there are only prompts."""
    from dataclasses import replace

    from bastion_batch.training.texts import is_output

    are_outputs = [is_output(output) for output in run.completions]
    if all(are_outputs):
        return run
    paths = tuple(output.path for output in run.completions)
    if any(are_outputs):
        raise InputError(
            f"--data {paths[are_outputs.index(True)]} is a job's output and "
            f"{paths[are_outputs.index(False)]} is not; give outputs or prompts"
        )
    completions = OutputConfig(
        path=str(run.out / "completions"), output_token_ids=True, steps="off"
    )
    config = JobConfig(
        name="drafter-data",
        input=prompts.model_copy(update={"path": paths}),
        output=completions,
        model=ModelConfig(
            target=run.target, revision=run.revision, drafter=run.start, dtype=run.dtype
        ),
        decoding=DecodingConfig(
            method="ar" if run.start is None else "bastion", max_new_tokens=max_new_tokens
        ),
        workers=workers,
    )
    say(f"the target answers the prompts first, in {completions.path}")
    run_to_the_end(config, takeover=False)
    return replace(run, completions=(completions,))


def _prompts(path: str, column: str) -> InputConfig:
    return InputConfig(path=_absolute(path), prompt=column)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--taps {text}: numbers, comma-separated") from None


def _dtype(name: str) -> Dtype:
    known: dict[str, Dtype] = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}
    if name not in known:
        raise InputError(f"--dtype {name}: {', '.join(known)} are possible")
    return known[name]


def _device(name: str) -> Device:
    known: dict[str, Device] = {"auto": "auto", "cpu": "cpu", "cuda": "cuda"}
    if name not in known:
        raise InputError(f"--device {name}: {', '.join(known)} are possible")
    return known[name]


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _absolute_directory(name: str) -> str:
    """A model's name, made absolute if it is the path of a directory here."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name
