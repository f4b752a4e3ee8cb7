"""A training run from its options to a trained drafter: everything is checked before it begins."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bastion_batch.config import Dtype, InputConfig, OutputConfig
from bastion_batch.engine.checkpoints import (
    ModelFiles,
    load_tokenizer,
    resolve_drafter,
    resolve_target,
)
from bastion_batch.engine.device import pick_device, pick_dtype
from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.own_text import OwnText
from bastion_batch.engine.target import Target
from bastion_batch.errors import InputError
from bastion_batch.training.loop import Materials, Trainer
from bastion_batch.training.model import DrafterModel
from bastion_batch.training.settings import (
    Recipe,
    Schedule,
    Shape,
    free_token_id,
    shape_for,
    shape_of,
)
from bastion_batch.training.start import load_drafter_weights, load_target_layers, randomise
from bastion_batch.training.state import Progress, RunFiles
from bastion_batch.training.texts import TextFiles, hold_out, read_completions, read_prompts

DEFAULT_LAYERS = 2
DEFAULT_BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What to train, on what, and where to."""

    target: str
    revision: str | None = None
    completions: tuple[OutputConfig, ...]
    """Outputs of jobs of ours on this target."""
    held_out: InputConfig | None = None
    """Prompts to measure on; texts are taken out of the completions if None."""
    num_held_out: int = 32
    """Prompts measured on."""
    out: Path
    start: str | None = None
    """Drafter to go on from; the target's last layers if None."""
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    """What is None is the starting drafter's, or else a default."""
    recipe: Recipe
    schedule: Schedule
    dtype: Dtype = "auto"
    device: str = "auto"


class _Plan(NamedTuple):
    target: ModelFiles
    start: ModelFiles | None
    shape: Shape
    tokenizer: Any


def check_run(run: TrainingRun) -> None:
    """Check all that can be checked without the completions.

    Raises:
        InputError: naming the option, its value and the limit.
    """
    plan = _plan(run)
    if run.held_out is not None:
        read_prompts(run.held_out, plan.tokenizer, plan.target, run.num_held_out)


def train_drafter(run: TrainingRun, say: Callable[[str], None]) -> Progress:
    """Train a drafter, or go on where a killed run stopped.

    Raises:
        InputError: an option, a model, the completions or the output directory is refused.
    """
    plan = _plan(run)
    files = RunFiles(run.out)
    with files.held():
        found = TextFiles.joined(
            read_completions(output, plan.tokenizer, plan.target, run.recipe.max_text_tokens)
            for output in run.completions
        )
        texts, prompts = _split(run, plan, found.texts)
        about = _about(run, plan, found, len(texts), len(prompts))
        files.require_same_run({**about, "held_out": _digest_of(prompts)})
        say(
            f"{len(texts):,} texts of {found.num_tokens / len(found.texts):.0f} tokens, "
            f"{len(prompts)} held-out prompts; {found.num_skipped:,} rows are of no use"
        )
        device = pick_device(run.device)
        target = Target.load(plan.target.path, pick_dtype(run.dtype, device), device)
        materials = Materials(
            target=target,
            model=_initial_model(run, plan),
            texts=texts,
            held_out=prompts,
            files=files,
            about=about,
        )
        trainer = Trainer(materials, run.recipe, run.schedule, say)
        return trainer.train()


def _plan(run: TrainingRun) -> _Plan:
    run.recipe.require_usable()
    run.schedule.require_usable()
    if run.num_held_out < 1:
        raise InputError(f"held-out prompts are {run.num_held_out}; at least 1 is needed")
    target = resolve_target(run.target, run.revision)
    tokenizer = load_tokenizer(target.path)
    start = resolve_drafter(run.start, target.name)
    if start is not None and start.path.resolve() == run.out.resolve():
        raise InputError(f"{run.out} is both where the drafter begins and where it is written")
    shape = _shape(run, target, start, tokenizer)
    shape.require_usable()
    return _Plan(target, start, shape, tokenizer)


def _shape(
    run: TrainingRun,
    target: ModelFiles,
    start: ModelFiles | None,
    tokenizer: Any,  # noqa: ANN401
) -> Shape:
    config = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    if start is None:
        mask = run.mask_token_id
        if mask is None:
            mask = free_token_id(tokenizer, config["vocab_size"], target.path)
        shape = shape_for(
            config,
            num_layers=DEFAULT_LAYERS if run.layers is None else run.layers,
            block_size=DEFAULT_BLOCK_SIZE if run.block_size is None else run.block_size,
            mask_token_id=mask,
        )
        return shape.changed(taps=run.taps)
    found = shape_of(describe_directory(start.path), config["num_hidden_layers"])
    if found.hidden_size != config["hidden_size"] or found.vocab_size != config["vocab_size"]:
        raise InputError(
            f"drafter {start.path} is for a target of hidden size {found.hidden_size} and "
            f"{found.vocab_size} tokens; {target.name} has {config['hidden_size']} and "
            f"{config['vocab_size']}"
        )
    _refuse_reshaping(run, found)
    return found.changed(block_size=run.block_size, mask_token_id=run.mask_token_id)


def _refuse_reshaping(run: TrainingRun, found: Shape) -> None:
    for name, asked, has in (
        ("layers", run.layers, found.num_layers),
        ("taps", run.taps, found.taps),
    ):
        if asked is not None and asked != has:
            raise InputError(f"{name} is {asked}; the drafter to go on from has {has}")


def _split(
    run: TrainingRun, plan: _Plan, texts: list[OwnText]
) -> tuple[list[OwnText], list[tuple[int, ...]]]:
    """Texts to train on, and held-out prompts that leave room for an answer."""
    if run.held_out is None:
        texts, prompts = hold_out(texts, run.num_held_out)
    else:
        prompts = read_prompts(run.held_out, plan.tokenizer, plan.target, run.num_held_out)
    room = plan.shape.max_positions - run.schedule.check_tokens
    fitting = [ids for ids in prompts if len(ids) < room]
    if not fitting:
        raise InputError(
            f"no held-out prompt leaves room for {run.schedule.check_tokens} tokens in the "
            f"context of {plan.shape.max_positions}"
        )
    return texts, fitting


def _about(
    run: TrainingRun, plan: _Plan, found: TextFiles, num_texts: int, num_prompts: int
) -> dict[str, Any]:
    """What a run is: it is the same run while this is the same."""
    return {
        "target": plan.target.digest,
        "start": plan.start.digest if plan.start else "target's last layers",
        "texts": found.digest,
        "num_texts": num_texts,
        "num_output_tokens": found.num_tokens,
        "num_held_out": num_prompts,
        "shape": asdict(plan.shape),
        "recipe": run.recipe.identity,
        "dtype": str(pick_dtype(run.dtype, pick_device(run.device))),
        "tree_nodes": run.schedule.tree_nodes,
        "check_tokens": run.schedule.check_tokens,
    }


def _digest_of(prompts: list[tuple[int, ...]]) -> str:
    return TextFiles([OwnText(ids, ()) for ids in prompts], 0).digest


def _initial_model(run: TrainingRun, plan: _Plan) -> DrafterModel:
    torch.manual_seed(run.recipe.seed)
    model = DrafterModel(plan.shape)
    if plan.start is not None:
        load_drafter_weights(model, plan.start.path)
    elif plan.shape.num_layers <= plan.shape.num_target_layers:
        load_target_layers(model, plan.target.path, run.recipe.seed)
    else:
        randomise(model, run.recipe.seed)
    return model
