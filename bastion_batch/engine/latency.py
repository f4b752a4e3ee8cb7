"""What passes cost on this device: priors, first measurements, and learning from every step."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bastion_batch.core.roofline import LatencyModel, Timing
from bastion_batch.core.tree import DraftTree
from bastion_batch.engine.device import device_speed, median_seconds
from bastion_batch.engine.drafters import Drafter, DraftRow
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Work, verify
from bastion_batch.engine.target import Target
from bastion_batch.records import Request

VERIFY_GRID = ((1, 1), (16, 1), (64, 1), (4, 1), (8, 8), (32, 1), (128, 8), (2, 1), (8, 1), (32, 8))
"""(pass tokens, rows) timed at start-up, those that say most first."""
DRAFT_GRID = (1, 16, 4)
"""Rows of the draft passes timed at start-up."""
CONTEXT = 128
MAX_SECONDS = 6.0
"""No further pass of a kind is timed after so long: a busy machine must not delay the start, and
what was not timed is interpolated and then corrected by the steps themselves."""


class StepCosts:
    """Predicted seconds of the parts of a step, each corrected by what is observed.

    `verify` and `draft` are rooflines with corrections. What a step takes outside the two passes,
    the projection of taps into the drafter's cache included, is a running mean over decode steps.
    Passes that carry prompts teach nothing: their head runs on fewer tokens than it is priced for.
    """

    def __init__(
        self, verify_model: LatencyModel, draft_model: LatencyModel | None, width: int
    ) -> None:
        self.verify = verify_model
        self.draft = draft_model
        self._width = width
        self.other_seconds = 1e-3

    def draft_seconds(self, num_rows: int, context_tokens: int) -> float:
        """Predicted seconds of a draft pass."""
        if self.draft is None or not num_rows:
            return 0.0
        return self.draft.seconds(num_rows * self._width, num_rows, context_tokens)

    def observe_draft(self, num_rows: int, context_tokens: int, seconds: float) -> None:
        """Learn from a draft pass."""
        if self.draft is not None:
            self.draft.observe(num_rows * self._width, num_rows, context_tokens, seconds)

    def observe_other(self, seconds: float) -> None:
        """Learn from the time of a step outside its passes."""
        self.other_seconds += 0.05 * (seconds - self.other_seconds)

    def step_seconds(
        self, num_tokens: NDArray[np.floating], num_rows: int, context_tokens: int, drafted: bool
    ) -> NDArray[np.float64]:
        """Predicted seconds of whole steps that verify so many tokens each."""
        draft = self.draft_seconds(num_rows, context_tokens) if drafted else 0.0
        verify_seconds = self.verify.seconds(num_tokens, num_rows, context_tokens)
        return verify_seconds + draft + self.other_seconds

    def summary(self) -> dict[str, Any]:
        """The fitted models, JSON-able."""
        return {
            "verify": self.verify.summary(),
            "draft": self.draft.summary() if self.draft else None,
            "other_seconds": self.other_seconds,
        }


def calibrate(target: Target, drafter: Drafter | None) -> StepCosts:
    """Time the engine's own passes on a small grid and fit their latency models (a few seconds)."""
    speed = device_speed(target.device, target.dtype)
    model = LatencyModel(target.shape, speed.flops, speed.bandwidth)
    model.fit(_time_verify(target, drafter.taps if drafter else ()))
    if drafter is None or drafter.shape is None:
        return StepCosts(model, None, 1)
    draft = LatencyModel(drafter.shape, speed.flops, speed.bandwidth)
    draft.fit(_time_draft(target, drafter))
    return StepCosts(model, draft, drafter.depth + 1)


def _time_verify(target: Target, taps: tuple[int, ...]) -> list[Timing]:
    timings: list[Timing] = []
    deadline = time.perf_counter() + MAX_SECONDS
    for num_tokens, num_rows in VERIFY_GRID:
        if timings and time.perf_counter() > deadline:
            break
        cache = target.new_cache()
        works = [_fan(target, row, num_tokens // num_rows) for row in range(num_rows)]
        for work in works:
            work.row.slot = cache.open(CONTEXT + num_tokens)
            work.row.slot.length = CONTEXT
        seconds = median_seconds(lambda w=works, c=cache: verify(target, c, w, taps), target.device)
        timings.append(Timing(num_tokens, num_rows, num_rows * CONTEXT, seconds))
    return timings


def _fan(target: Target, key: int, num_tokens: int) -> Work:
    """A root with `num_tokens - 1` children, after a made-up context."""
    ids = (np.arange(CONTEXT + 1) + key) % target.ids.vocab_size
    row = Row(Request(row_id="", prompt_ids=tuple(ids.tolist())), key, frozenset(), None)
    children = num_tokens - 1
    tree = DraftTree([-1] + [0] * children, [0] + [1] * children, [-1, *range(children)])
    return Work(row, [1] * num_tokens, tree)


def _time_draft(target: Target, drafter: Drafter) -> list[Timing]:
    width = drafter.depth + 1
    num_features = len(drafter.taps) * target.stack.config.hidden_size
    features = torch.zeros(CONTEXT, num_features, dtype=target.dtype, device=target.device)
    timings: list[Timing] = []
    deadline = time.perf_counter() + MAX_SECONDS
    for num_rows in DRAFT_GRID:
        if timings and time.perf_counter() > deadline:
            break
        keys = [-1 - row for row in range(num_rows)]
        for key in keys:
            drafter.observe([key], [CONTEXT], features)
        rows = [DraftRow(key, [1] * (CONTEXT + 1)) for key in keys]
        seconds = median_seconds(lambda r=rows: drafter.draft(r), target.device)
        timings.append(Timing(num_rows * width, num_rows, num_rows * CONTEXT, seconds))
        for key in keys:
            drafter.forget(key)
    return timings
