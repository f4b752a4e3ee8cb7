"""Methods side by side: the same prompts, one process, arms alternating so that drift cancels.

Every arm decodes the same group of prompts before the next group is begun, in an order that is
reversed from group to group. A group's speed ratios are therefore taken within seconds of one
another, and the figure reported is their median with a bootstrap interval.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bastion_batch.engine import Engine, EngineTotals
from bastion_batch.records import Request, SamplingParams

Prompt = tuple[int, ...]


class ArmRun(NamedTuple):
    """One arm on one group of prompts."""

    num_tokens: int
    seconds: float
    totals: EngineTotals | None
    outputs: tuple[Prompt, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.num_tokens / self.seconds


class Ratio(NamedTuple):
    """The speed of one arm over another's, of paired groups."""

    median: float
    low: float
    high: float
    """The 90 % bootstrap interval of the median."""


Arm = Callable[[Sequence[Prompt]], ArmRun]


def engine_arm(engine: Engine, max_new_tokens: int, temperature: float = 0.0) -> Arm:
    """Decode with an engine; its caches and latency models stay warm from group to group."""

    def run(prompts: Sequence[Prompt]) -> ArmRun:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
        requests = [
            Request(row_id=str(number), prompt_ids=prompt, sampling=sampling, noise_key=number)
            for number, prompt in enumerate(prompts)
        ]
        before = engine.totals
        start = time.perf_counter()
        completions = {c.row_id: c for c in engine.generate(requests)}
        seconds = time.perf_counter() - start
        totals = engine.totals.minus(before)
        outputs = tuple(completions[request.row_id].output_ids for request in requests)
        return ArmRun(sum(map(len, outputs)), seconds, totals, outputs)

    return run


def transformers_arm(module: Any, end_ids: Sequence[int], max_new_tokens: int) -> Arm:  # noqa: ANN401
    """Decode with transformers' own greedy `generate`, one prompt at a time."""
    import torch

    def run(prompts: Sequence[Prompt]) -> ArmRun:
        outputs = []
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=module.device)
            with torch.inference_mode():
                out = module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(end_ids),
                    pad_token_id=end_ids[0],
                )
            outputs.append(tuple(out[0, len(prompt) :].tolist()))
        seconds = time.perf_counter() - start
        return ArmRun(sum(map(len, outputs)), seconds, None, tuple(outputs))

    return run


def alternate(
    arms: dict[str, Arm],
    groups: Sequence[Sequence[Prompt]],
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[ArmRun]]:
    """Run every arm on every group, forwards and backwards by turns, after a warm-up."""
    for arm in arms.values():
        arm(groups[0][:1])
    runs: dict[str, list[ArmRun]] = {name: [] for name in arms}
    for number, group in enumerate(groups):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in names:
            run = arms[name](group)
            runs[name].append(run)
            progress(f"group {number + 1}/{len(groups)} {name}: {run.tokens_per_second:.1f} tok/s")
    return runs


def speed_ratio(runs: Sequence[ArmRun], baseline: Sequence[ArmRun]) -> Ratio:
    """Median over groups of the ratio of tokens per second, with its bootstrap interval."""
    pairs = zip(runs, baseline, strict=True)
    ratios = np.array([a.tokens_per_second / b.tokens_per_second for a, b in pairs])
    generator = np.random.default_rng(0)
    resampled = generator.choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(resampled, 1), [0.05, 0.95])
    return Ratio(float(np.median(ratios)), float(low), float(high))
