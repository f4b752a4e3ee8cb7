"""A real language model, greedy in float32: the engine's text is transformers' own.

A row may differ from the reference only where the reference itself hangs on a near-tie: its two
best logits are closer than 5e-4 at the first difference, and a float64 pass agrees.
"""

import copy
import gzip
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bastion_batch.engine import Engine
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.target import Target
from bastion_batch.records import Request, SamplingParams

NAME = "smollm2-135m-instruct"
PROMPTS = Path(__file__).parent.parent / "jobs" / "data" / "prompts.jsonl"
REFERENCE = Path(__file__).parent / "data" / "smollm2-greedy-256.json.gz"
MARGIN = 5e-4


class Models(NamedTuple):
    module: torch.nn.Module
    target: Target
    drafter: DFlashDrafter
    prompts: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def models():
    from transformers import AutoModelForCausalLM

    files = resolve_target(NAME)
    module = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    target = Target.of_module(module)
    draft_files = resolve_drafter("default", NAME)
    assert draft_files is not None
    tokenizer = load_tokenizer(files.path)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for text in texts
    ]
    return Models(module, target, load_drafter(draft_files.path, target), prompts)


def generate_alone(models: Models, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = models.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=2,
        )
    return tuple(out[0, ids.shape[1] :].tolist())


def decode(models: Models, prompts, num_tokens: int, method: str, max_batch: int):
    engine = Engine(models.target, models.drafter, method=method, max_batch=max_batch)
    sampling = SamplingParams(max_new_tokens=num_tokens)
    wanted = [
        Request(row_id=str(n), prompt_ids=prompt, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]
    found = {c.row_id: c for c in engine.generate(wanted)}
    engine.check_integrity()
    return [found[r.row_id].output_ids for r in wanted], engine.totals


def is_near_tie(models: Models, text: tuple[int, ...]) -> bool:
    """Whether the reference's choice after `text` hangs on less than `MARGIN`, in both widths."""
    margins = []
    for dtype in (torch.float32, torch.float64):
        module = models.module.to(dtype)
        with torch.no_grad():
            logits = module(torch.tensor([text])).logits[0, -1]
        best = logits.topk(2).values
        margins.append(float(best[0] - best[1]))
    models.module.to(torch.float32)
    return max(margins) < MARGIN


def differing(models: Models, prompts, expected, found) -> list[int]:
    """Rows whose text differs; each must do so at a near-tie."""
    rows = [n for n, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    for row in rows:
        pairs = zip(expected[row], found[row], strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        text = prompts[row] + expected[row][:first]
        assert is_near_tie(models, text), f"prompt {row} differs at token {first}, no near-tie"
    return rows


def test_a_few_prompts_equal_transformers(models):
    prompts = models.prompts[:3]
    expected = [generate_alone(models, prompt, 24) for prompt in prompts]
    found, totals = decode(models, prompts, 24, "bastion", max_batch=3)
    assert differing(models, prompts, expected, found) == []
    assert totals.num_accepted > 0, "the built-in drafter proposes tokens that are accepted"


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def kept_reference(models):
    """transformers' own text of the first 64 prompts, one at a time, 256 tokens: computed once.

    Another processor's arithmetic may turn near-ties the other way, which is allowed here too.
    """
    texts = json.loads(gzip.decompress(REFERENCE.read_bytes()))
    assert generate_alone(models, models.prompts[0], 16) == tuple(texts[0][:16])
    return [tuple(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "bastion"])
@pytest.mark.parametrize(("num_prompts", "max_batch"), [(16, 1), (64, 4), (64, 16)])
@pytest.mark.usefixtures("all_threads")
def test_many_prompts_equal_transformers(models, kept_reference, method, num_prompts, max_batch):
    prompts = models.prompts[:num_prompts]
    found, totals = decode(models, prompts, 256, method, max_batch)
    rows = differing(models, prompts, kept_reference[:num_prompts], found)
    print(method, max_batch, "differing rows", rows, totals)  # noqa: T201 - figures for the log
    assert len(rows) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_batch",
    [
        1,
        pytest.param(
            8,
            marks=pytest.mark.xfail(
                reason="about one of 90 first differences is at 3 ulps; trees depend on timing",
                strict=False,
            ),
        ),
    ],
)
@pytest.mark.usefixtures("all_threads")
def test_bfloat16_differs_from_transformers_at_near_ties_only(models, max_batch):
    """No first difference where the reference's margin is over 2 ulps of its best logit."""
    module = copy.deepcopy(models.module).to(torch.bfloat16)
    target = Target.of_module(module)
    files = resolve_drafter("default", NAME)
    narrow = models._replace(target=target, drafter=load_drafter(files.path, target))
    prompts = models.prompts[:32]
    found, _ = decode(narrow, prompts, 128, "bastion", max_batch)
    margins = [m for p, f in zip(prompts, found, strict=True) if (m := first_margin(module, p, f))]
    print("batch", max_batch, "rows that differ", len(margins), "ulps", margins)  # noqa: T201
    assert max(margins, default=0) <= 2


def first_margin(module, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    """By how many bfloat16 ulps the reference prefers another token, where it first does."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    behind = best - logits[torch.arange(len(output)), torch.tensor(output)]
    ulps = behind / (best.abs().log2().floor().exp2() * 2.0**-7)
    return next((float(ulp) for ulp in ulps if ulp > 0), 0.0)
