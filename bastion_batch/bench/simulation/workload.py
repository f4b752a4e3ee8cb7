"""Rows whose output lengths are partly predictable.

    log length = task effect (20 tasks) + slope * log prompt length + residual

The first two explain a given share of the variance; the total deviation is `sigma`. Lengths are
scaled to the wanted mean after the cap. Who predicts sees task, prompt length and cap, never the
length. Rows lie in spans, spans are cut into units, as a plan does it.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_TASKS = 20
PROMPT_LOG_MEDIAN = math.log(200)
PROMPT_LOG_SIGMA = 0.7
MAX_PROMPT_TOKENS = 4096
TASK_PART = 0.7
"""Of the explained variance; the rest is the prompt length's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What the rows of a job are like."""

    num_rows: int = 20_000
    sigma: float = 1.0
    """Standard deviation of the log length."""
    share: float = 0.8
    """Of its variance, how much task and prompt length explain."""
    mean_tokens: float = 900.0
    max_new_tokens: int = 16_384
    rows_per_unit: int | None = None
    """As a plan cuts them when None."""
    units_per_span: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The rows of a job in input order, and the units they lie in."""

    config: WorkloadConfig
    tasks_R: NDArray[np.int16]
    prompt_tokens_R: NDArray[np.int32]
    lengths_R: NDArray[np.int32]
    unit_starts: array
    """First row of each unit, and the number of rows at the end."""
    unit_spans: array
    """The span of each unit."""

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self.unit_spans)

    def rows(self, unit: int) -> range:
        """The rows of a unit."""
        return range(self.unit_starts[unit], self.unit_starts[unit + 1])


def make_workload(config: WorkloadConfig) -> Workload:
    """Draw a job; the same config gives the same rows."""
    generator = np.random.default_rng(config.seed)
    num_rows = config.num_rows
    tasks_R = generator.integers(0, NUM_TASKS, num_rows, dtype=np.int16)
    log_prompts_R = generator.normal(0.0, PROMPT_LOG_SIGMA, num_rows).astype(np.float32)
    explained = math.sqrt(config.share) * config.sigma
    effects = generator.normal(size=NUM_TASKS)
    effects = (effects - effects.mean()) / effects.std() * math.sqrt(TASK_PART) * explained
    slope = math.sqrt(1 - TASK_PART) * explained / PROMPT_LOG_SIGMA
    residual = math.sqrt(1 - config.share) * config.sigma
    logs_R = generator.normal(0.0, residual, num_rows).astype(np.float32)
    logs_R += effects.astype(np.float32)[tasks_R]
    logs_R += np.float32(slope) * log_prompts_R
    prompts_R = np.exp(log_prompts_R + np.float32(PROMPT_LOG_MEDIAN))
    starts, spans = _cut(config)
    return Workload(
        config=config,
        tasks_R=tasks_R,
        prompt_tokens_R=np.clip(prompts_R, 1, MAX_PROMPT_TOKENS).astype(np.int32),
        lengths_R=_scaled(np.exp(logs_R, out=logs_R), config),
        unit_starts=starts,
        unit_spans=spans,
    )


def _scaled(lengths_R: NDArray[np.float32], config: WorkloadConfig) -> NDArray[np.int32]:
    """Whole lengths of at least 1 and at most the cap, with the wanted mean."""
    some = lengths_R[:200_000].astype(np.float64)
    low, high = 0.0, config.max_new_tokens / some.min()
    for _ in range(60):
        middle = (low + high) / 2
        mean = np.clip(some * middle, 1, config.max_new_tokens).mean()
        low, high = (middle, high) if mean < config.mean_tokens else (low, middle)
    scaled_R = np.ceil(lengths_R * np.float32(high))
    return np.clip(scaled_R, 1, config.max_new_tokens).astype(np.int32)


def _cut(config: WorkloadConfig) -> tuple[array, array]:
    """Starts and spans of even units."""
    wanted = config.rows_per_unit or planned_rows_per_unit(config.num_rows)
    num_units = max(1, math.ceil(config.num_rows / wanted))
    starts = array("q", (config.num_rows * i // num_units for i in range(num_units + 1)))
    return starts, array("q", (unit // config.units_per_span for unit in range(num_units)))


def planned_rows_per_unit(num_rows: int) -> int:
    """Rows of a unit where the plan decides."""
    from bastion_batch.io.units import rows_per_unit

    return rows_per_unit("auto", num_rows, 1)
