"""How well a new engine foresees its verification passes: by context length, after 50 steps of each."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bastion_batch.bench.blocks import LiveRows
from bastion_batch.bench.setup import Bench
from bastion_batch.engine import Engine
from bastion_batch.records import SamplingParams, StepTiming

CONTEXTS = (64, 500, 2000)
WARM_STEPS, COUNTED_STEPS = 50, 60
TOKENS_PER_STEP = 4
"""Of a row, more than it gets: so that no row ends, and no prompt comes, while steps are counted."""
MAX_ERROR = 0.10
"""Median absolute error of a prediction, as a share of what the pass took."""

Progress = Callable[[str], None]


def measure_prediction(
    bench: Bench,
    batch_size: int,
    progress: Progress,
    *,
    contexts: Sequence[int] = CONTEXTS,
    counted_steps: int = COUNTED_STEPS,
) -> dict[str, Any]:
    """Predicted against measured seconds of verification, `bastion` deciding; JSON-able.

    Every context length has an engine of its own, which has seen nothing before.
    """
    parts: dict[str, Any] = {}
    for context in contexts:
        start = time.perf_counter()
        engine = bench.engine(batch_size, bench.drafter(), "bastion")
        seconds = time.perf_counter() - start
        errors = _errors(_timings(bench, engine, context, counted_steps))
        parts[str(context)] = {"calibration_seconds": round(seconds, 2), **errors}
        progress(f"context {context}: {parts[str(context)]}")
    holds = all(part["median_error"] < MAX_ERROR for part in parts.values())
    return {"batch": batch_size, "prediction": {"contexts": parts, "holds": holds}}


def _timings(
    bench: Bench, engine: Engine, context: int, counted_steps: int
) -> Sequence[StepTiming]:
    """The counted steps, without prompts, of rows whose contexts are about so long."""
    prompt = max(len(prompt) for prompt in bench.prompts)
    made_up = max(1, context - prompt)
    most = TOKENS_PER_STEP * (WARM_STEPS + counted_steps)
    sampling = SamplingParams(
        max_new_tokens=made_up + most,
        temperature=bench.config.temperature,
        ignore_eos=True,
    )
    timings: dict[int, StepTiming] = {}
    rows = LiveRows(engine, bench.prompts, sampling, num_made_up=made_up)
    num_steps = 0
    while num_steps < WARM_STEPS + counted_steps:
        num_steps += not rows.step().totals.num_prefill_tokens
    for row_id, sample_index in list(engine.num_tokens()):
        exported = engine.export(row_id, sample_index)
        timings |= {record.timing.step: record.timing for record in exported.records}
    passes = [timings[step] for step in sorted(timings) if not timings[step].prefill_tokens]
    return passes[-counted_steps:]


def _errors(passes: Sequence[StepTiming]) -> dict[str, float]:
    predicted, taken, nodes = (
        np.array(values)
        for values in zip(
            *((t.predicted_verify_seconds, t.verify_seconds, t.budget_nodes) for t in passes),
            strict=True,
        )
    )
    errors = np.abs(predicted / taken - 1)
    return {
        "num_steps": len(passes),
        "median_error": round(float(np.median(errors)), 4),
        "ninth_decile_error": round(float(np.quantile(errors, 0.9)), 4),
        "median_bias": round(float(np.median(predicted / taken)) - 1, 4),
        "nodes_per_step": round(float(nodes.mean()), 2),
        "verify_seconds": round(float(np.median(taken)), 6),
    }
