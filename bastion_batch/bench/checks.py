"""Single questions about the engine: its overhead, and what a bad drafter costs it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bastion_batch.bench.blocks import Arm, LiveRows, alternate
from bastion_batch.bench.ratios import Ratio, paired_ratio
from bastion_batch.bench.setup import Bench
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.records import Completion, Method, StepTiming

STAGES = ("prefill", "draft", "build", "verify", "commit", "other")
USELESS_BLOCKS, USELESS_BLOCK_STEPS = 20, 25

Progress = Callable[[str], None]


class _Timings:
    """The timings of the steps of some rows, each step once."""

    def __init__(self) -> None:
        self.by_step: dict[int, StepTiming] = {}

    def add(self, completion: Completion) -> None:
        for record in completion.records:
            self.by_step[record.timing.step] = record.timing

    def decoding(self, batch_size: int) -> list[StepTiming]:
        """Those of a full batch that carried no prompt."""
        return [
            timing
            for timing in self.by_step.values()
            if timing.batch_size == batch_size and not timing.prefill_tokens
        ]


def measure_overhead(bench: Bench, batch_size: int, progress: Progress) -> dict[str, Any]:
    """How much of a step is spent outside the two model passes, by method; JSON-able."""
    methods: tuple[Method, ...] = ("ar", "dflash", "ddtree", "bastion")
    engine = bench.engine(batch_size, bench.drafter(), "bastion")
    per_row = max(1, min(16, bench.config.max_nodes // batch_size))
    reports: dict[str, Any] = {}
    for method in methods:
        timings = _Timings()
        rows = LiveRows(engine, bench.prompts, bench.config.sampling, timings.add)
        engine.use(method, per_row)
        end = time.perf_counter() + bench.config.seconds / len(methods)
        while time.perf_counter() < end:
            rows.step()
        num_steps = engine.totals.num_steps
        rows.drain()
        counted = [t for t in timings.decoding(batch_size) if t.step < num_steps]
        reports[method] = _overhead(counted)
        progress(f"{method}: {reports[method]}")
    return {"batch": batch_size, "overhead": reports}


def _overhead(timings: Sequence[StepTiming]) -> dict[str, float]:
    if not timings:
        return {"num_steps": 0}
    stages = {
        name: np.array([getattr(timing, f"{name}_seconds") for timing in timings])
        for name in STAGES
    }
    step = np.array([timing.step_seconds for timing in timings])
    outside = step - stages["prefill"] - stages["draft"] - stages["verify"]
    gap = np.abs(sum(stages.values()) - step) / step
    return {
        "num_steps": len(timings),
        "step_seconds": round(float(np.median(step)), 6),
        "outside_passes_share": round(float(outside.sum() / step.sum()), 4),
        "outside_passes_median_share": round(float(np.median(outside / step)), 4),
        "largest_gap_of_stages": round(float(gap.max()), 5),
        **{f"{name}_share": round(float(stages[name].sum() / step.sum()), 4) for name in STAGES},
    }


def measure_useless(
    bench: Bench, batch_size: int, progress: Progress, *, num_blocks: int = USELESS_BLOCKS
) -> dict[str, Any]:
    """`bastion` with a drafter of random weights against plain decoding; JSON-able.

    Every step of the drafted arm counts, those in which it learns that drafting does not pay too.
    """
    engine = bench.engine(batch_size, random_drafter(bench), "bastion")
    alone = bench.engine(batch_size, None, "ar")
    sampling = bench.config.sampling
    arms = [
        Arm("ar", LiveRows(alone, bench.prompts, sampling), "ar"),
        Arm("bastion", LiveRows(engine, bench.prompts, sampling), "bastion"),
    ]
    groups = alternate(
        arms,
        seconds=0.0,
        block_steps=USELESS_BLOCK_STEPS,
        min_groups=num_blocks,
        uncounted_steps=0,
        progress=progress,
    )
    plain, drafted = zip(*groups, strict=True)
    shares, base = [b.share for b in drafted], [b.share for b in plain]
    settled = num_blocks // 4
    return {
        "batch": batch_size,
        "useless": {
            "num_steps": sum(block.num_steps for block in drafted),
            "nodes_per_row_step": round(
                sum(b.num_nodes for b in drafted) / sum(b.num_row_steps for b in drafted), 3
            ),
            "bastion/ar": _rounded(paired_ratio(shares, base)),
            "bastion/ar_after_a_quarter": _rounded(paired_ratio(shares[settled:], base[settled:])),
        },
    }


def _rounded(ratio: Ratio) -> dict[str, float]:
    return {key: round(value, 4) for key, value in ratio._asdict().items()}


def random_drafter(bench: Bench) -> DFlashDrafter:
    """A drafter of the real one's shape whose matrices are noise: it costs as much and knows nothing."""
    real = bench.drafter_path
    if real is None:
        return bench.drafter()  # which says that there is none
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: _noise_like(tensor, generator) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(real / "model.safetensors").items()
    }
    with TemporaryDirectory() as directory:
        copyfile(real / "config.json", Path(directory) / "config.json")
        save_file(tensors, Path(directory) / "model.safetensors")
        return load_drafter(Path(directory), bench.target)


def _noise_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
    return noise.to(tensor.dtype)
