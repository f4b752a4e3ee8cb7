"""A tiny target and what it said to some prompts, as a job's output, for the tests of training."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from io_jobs import make_job, read, write_jsonl
from tiny import fixed_costs
from tiny_checkpoint import save_tiny_checkpoint
from transformers import LlamaForCausalLM

from bastion_batch.engine import Engine
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_target
from bastion_batch.engine.target import Target
from bastion_batch.io.commit import commit_unit
from bastion_batch.io.planning import open_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.sinks import UnitBuilder
from bastion_batch.records import Request, SamplingParams

MASK = 200
"""A byte that the prompts do not contain."""
LAYER_SCALE = 0.015
WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "house",
    "river",
    "bird",
    "fish",
]


def prompt_rows(count: int, first: int = 0) -> list[dict]:
    def pick(number: int, step: int) -> str:
        return WORDS[(number * step + number // 7) % len(WORDS)]

    return [
        {"prompt": f"{pick(n, 1)} {pick(n, 4)} {pick(n, 7)} {n}", "id": n}
        for n in range(first, first + count)
    ]


def write_target(directory: Path) -> Path:
    """A target whose text has something to be learnt: mostly a walk through cycles of 16 bytes.

    Its layers say little, and the head looks for the next byte of the last one's cycle.
    """
    save_tiny_checkpoint(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= LAYER_SCALE
            layer.mlp.down_proj.weight *= LAYER_SCALE
        places = torch.arange(len(model.lm_head.weight) - 1)
        successors = places // 16 * 16 + (5 * places + 3) % 16
        embedding = F.normalize(model.model.embed_tokens.weight, dim=-1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[1 + successors] = embedding[1:]
    model.save_pretrained(directory)
    return directory


def write_output(directory: Path, target: Path, num_rows: int, max_new_tokens: int, **changes):
    """A finished job's output, without Ray: answered by one engine."""
    prompts = write_jsonl(directory / "prompts.jsonl", prompt_rows(num_rows))
    options = {"model__target": str(target), "output__output_token_ids": True} | changes
    job = make_job(prompts, directory / "out", **options)
    files = resolve_target(str(target))
    plan = open_plan(job, files)
    model = Target.load(target, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(target)
    engine = Engine(model, tokenizer=tokenizer, method="ar", costs=fixed_costs(model), max_batch=64)
    renderer = PromptRenderer(job.input, tokenizer)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    for unit in range(plan.num_units):
        rows = read(plan, unit)
        requests = [
            Request(row_id=row_id, prompt_ids=renderer.render(rows.row(place)), sampling=sampling)
            for place, row_id in enumerate(rows.row_ids)
        ]
        builder = UnitBuilder(plan, unit, rows, worker="w", attempt=1, device="cpu")
        for completion in engine.generate(requests):
            builder.add(completion)
        commit_unit(job.output, plan, unit, 1, *builder.tables())
    return directory / "out"


def curve_of(out: Path) -> list[dict]:
    return json.loads((out / "curve.json").read_text())["curve"]
