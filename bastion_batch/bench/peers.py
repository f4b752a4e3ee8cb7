"""Other programs on the same weights: whole calls on the same groups of prompts, by turns.

A peer decodes a group as its users would: transformers' `generate` one prompt at a time or a padded
batch at once, and the `dflash` package's own loop. Each is imported when it is asked for. Speeds are
of whole calls, prompts included, on both sides.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bastion_batch.bench.blocks import Prompt
from bastion_batch.bench.ratios import Share, paired_ratio
from bastion_batch.bench.setup import Bench
from bastion_batch.engine import Engine
from bastion_batch.records import Request, SamplingParams

Output = tuple[int, ...]
Progress = Callable[[str], None]


class GroupRun(NamedTuple):
    """One arm on one group of prompts."""

    outputs: tuple[Output, ...]
    seconds: float

    @property
    def share(self) -> Share:
        """What a ratio needs of it."""
        return Share(sum(map(len, self.outputs)), self.seconds)


GroupArm = Callable[[Sequence[Prompt]], GroupRun]


def engine_arm(engine: Engine, sampling: SamplingParams) -> GroupArm:
    """Decode with an engine; its caches and latency models stay warm from group to group."""

    def run(prompts: Sequence[Prompt]) -> GroupRun:
        requests = [
            Request(row_id=str(number), prompt_ids=prompt, sampling=sampling, noise_key=number)
            for number, prompt in enumerate(prompts)
        ]
        start = time.perf_counter()
        completions = {c.row_id: c for c in engine.generate(requests)}
        seconds = time.perf_counter() - start
        return GroupRun(tuple(completions[r.row_id].output_ids for r in requests), seconds)

    return run


def transformers_arm(
    module: Any,  # noqa: ANN401 - any transformers model
    end_ids: Sequence[int],
    sampling: SamplingParams,
    batch_size: int = 1,
) -> GroupArm:
    """Decode with transformers' own greedy `generate`, `batch_size` prompts padded to a batch."""
    module.generation_config.eos_token_id = None if sampling.ignore_eos else list(end_ids)
    module.generation_config.pad_token_id = end_ids[0]

    def run(prompts: Sequence[Prompt]) -> GroupRun:
        outputs: list[Output] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            ids, mask = _padded(batch, end_ids[0], module.device)
            out = module.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=sampling.max_new_tokens,
            )
            tokens = out[:, ids.shape[1] :].tolist()
            ends = () if sampling.ignore_eos else end_ids
            outputs += [_up_to_end(row, ends) for row in tokens]
        return GroupRun(tuple(outputs), time.perf_counter() - start)

    return run


def dflash_arm(
    module: Any,  # noqa: ANN401 - any transformers model
    drafter_path: Path,
    end_ids: Sequence[int],
    sampling: SamplingParams,
) -> GroupArm:
    """Decode with the `dflash` package's own loop, one prompt at a time."""
    package = importlib.import_module("dflash.model")  # optional, so not a plain import
    drafter: Any = package.DFlashDraftModel.from_pretrained(
        drafter_path, attn_implementation="sdpa", dtype=module.dtype
    )
    drafter = drafter.to(module.device).eval()

    def run(prompts: Sequence[Prompt]) -> GroupRun:
        outputs: list[Output] = []
        start = time.perf_counter()
        for prompt in prompts:
            out = drafter.spec_generate(
                target=module,
                input_ids=torch.tensor([prompt], device=module.device),
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=list(end_ids),
                temperature=0.0,
            )
            outputs.append(_up_to_end(out[0, len(prompt) :].tolist(), end_ids))
        return GroupRun(tuple(outputs), time.perf_counter() - start)

    return run


def alternate_groups(
    arms: dict[str, GroupArm],
    groups: Callable[[int], Sequence[Prompt]],
    *,
    seconds: float,
    min_groups: int = 2,
    progress: Progress = lambda line: None,
) -> dict[str, list[GroupRun]]:
    """Every arm on one group after the other, forwards and backwards by turns, after a warm-up."""
    for arm in arms.values():
        arm(groups(0)[:1])
    runs: dict[str, list[GroupRun]] = {name: [] for name in arms}
    start = time.perf_counter()
    for number in count():
        elapsed = time.perf_counter() - start
        if number >= min_groups and elapsed + elapsed / number > seconds:
            return runs
        for name in arms if number % 2 == 0 else reversed(arms):
            run = arms[name](groups(number))
            runs[name].append(run)
            speed = run.share.num_tokens / run.seconds
            progress(f"group {number + 1} {name}: {speed:.1f} tok/s")
    raise AssertionError("unreachable: the count has no end")


def measure_peers(bench: Bench, batch_size: int, progress: Progress) -> dict[str, Any]:
    """This engine against its peers at one batch size, greedy; JSON-able."""
    if batch_size == 1:
        workloads = {"single": _single(bench, progress)}
        share = 1.0
    else:
        workloads = {kind: _batched(bench, batch_size, kind) for kind in ("equal", "ragged")}
        share = 0.5
    reports = {}
    for kind, (arms, groups) in workloads.items():
        runs = alternate_groups(
            arms,
            groups,
            seconds=share * bench.config.seconds,
            progress=lambda line, kind=kind: progress(f"{kind}, {line}"),
        )
        reports[kind] = _report(runs)
    return {"batch": batch_size, "workloads": reports}


Workload = tuple[dict[str, GroupArm], Callable[[int], Sequence[Prompt]]]


def _single(bench: Bench, progress: Progress) -> Workload:
    sampling, end_ids = _greedy(bench), sorted(bench.target.ids.end)
    module = _module(bench)
    arms = {"ar": engine_arm(bench.engine(1, None, "ar"), sampling)}
    if bench.drafter_path is not None:
        arms["bastion"] = engine_arm(bench.engine(1, bench.drafter(), "bastion"), sampling)
    arms["transformers"] = transformers_arm(module, end_ids, sampling)
    if bench.drafter_path is not None:
        if importlib.util.find_spec("dflash") is None:
            progress("the package dflash is not installed: its loop is left out")
        else:
            arms["dflash-package"] = dflash_arm(module, bench.drafter_path, end_ids, sampling)
    return arms, lambda number: [bench.prompts[number % len(bench.prompts)]]


def _batched(bench: Bench, batch_size: int, kind: str) -> Workload:
    """Rows of one length that all end together, or prompts as they come, two batches at a time."""
    sampling, end_ids = _greedy(bench), sorted(bench.target.ids.end)
    if kind == "equal":
        sampling = SamplingParams(max_new_tokens=sampling.max_new_tokens, ignore_eos=True)
    arms = {
        "ar": engine_arm(bench.engine(batch_size, None, "ar"), sampling),
        "transformers": transformers_arm(_module(bench), end_ids, sampling, batch_size),
    }
    size = batch_size if kind == "equal" else 2 * batch_size
    prompts = bench.prompts

    def group(number: int) -> Sequence[Prompt]:
        chosen = [prompts[(number * size + place) % len(prompts)] for place in range(size)]
        shortest = min(map(len, chosen))
        return [prompt[-shortest:] for prompt in chosen] if kind == "equal" else chosen

    return arms, group


def _greedy(bench: Bench) -> SamplingParams:
    return SamplingParams(max_new_tokens=bench.config.max_new_tokens)


def _module(bench: Bench) -> Any:  # noqa: ANN401 - a transformers model
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(bench.target_path, dtype=bench.target.dtype)
    return module.to(bench.target.device).eval()


def _padded(
    prompts: Sequence[Prompt], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def _up_to_end(token_ids: list[int], end_ids: Sequence[int]) -> Output:
    """The tokens up to and with the first end: what follows it is padding."""
    for place, token in enumerate(token_ids):
        if token in end_ids:
            return tuple(token_ids[: place + 1])
    return tuple(token_ids)


def _report(runs: dict[str, list[GroupRun]]) -> dict[str, Any]:
    shares = {name: [run.share for run in arm] for name, arm in runs.items()}
    first = next(iter(runs.values()))
    return {
        "arms": {
            name: {
                "tokens": sum(share.num_tokens for share in arm),
                "tokens_per_second": round(
                    sum(share.num_tokens for share in arm) / sum(share.seconds for share in arm), 2
                ),
                "same_text": round(_same_text(runs[name], first), 3),
            }
            for name, arm in shares.items()
        },
        "ratios": {
            f"{name}/{peer}": {
                key: round(value, 4)
                for key, value in paired_ratio(shares[name], shares[peer])._asdict().items()
            }
            for name in ("ar", "bastion")
            for peer in shares
            if name in shares and name != peer
        },
    }


def _same_text(runs: Sequence[GroupRun], first: Sequence[GroupRun]) -> float:
    """Share of prompts on which an arm's text equals that of the first arm."""
    pairs = [
        (a, b)
        for run, other in zip(runs, first, strict=True)
        for a, b in zip(run.outputs, other.outputs, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)
