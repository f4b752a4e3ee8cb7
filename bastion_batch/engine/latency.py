"""First measurements: the engine's own passes, timed on a small grid.

A time limit bounds each kind of pass: a busy machine must not delay the start. The points that say
most come first, and what was not timed is interpolated, then corrected by the steps themselves.
"""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import Timing
from bastion_batch.core.tree import DraftTree
from bastion_batch.engine.attention import call_pairs
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.device import device_speed, median_seconds
from bastion_batch.engine.drafters import Drafter, DraftRow
from bastion_batch.engine.row import Row
from bastion_batch.engine.row_attention import attends_by_row
from bastion_batch.engine.step import Work, verify
from bastion_batch.engine.target import Target
from bastion_batch.records import Request

CALIBRATION_VERSION = 5
"""Of the grids, the fit and what is kept of them: profiles of another version are not read."""

MAX_CACHE_BYTES = 1 << 30
"""No point is timed whose rows' contexts would need a larger cache."""

MAX_DRIFT = 1.3
"""A profile whose prediction is wrong by more than this factor is corrected, or given up."""


class Point(NamedTuple):
    """A pass to time."""

    num_tokens: int
    """Over all rows."""
    num_rows: int
    context: int
    """Cached tokens of each row."""


class DraftPoint(NamedTuple):
    """A draft pass to time."""

    depth: int
    """Positions scored of each row, cut at the drafter's own depth."""
    num_rows: int
    context: int


class Grid(NamedTuple):
    """Which passes are timed, and for how long at most."""

    verify: Sequence[Point]
    verify_seconds: float
    """No pass is begun that might not end within so long, but the first."""
    draft: Sequence[DraftPoint]
    draft_seconds: float


FULL = 1 << 10
"""A depth that no drafter has."""

COARSE = Grid(
    verify=[
        Point(*point)
        for point in (
            (1, 1, 128), (16, 1, 128), (64, 1, 128), (1, 1, 1024), (8, 8, 128), (64, 1, 1024),
            (4, 1, 128), (64, 8, 128), (32, 1, 128), (17, 1, 128), (8, 8, 1024), (128, 8, 128),
            (8, 1, 128), (33, 1, 128), (64, 8, 1024), (48, 1, 128), (16, 1, 1024), (16, 16, 128),
            (9, 1, 128), (256, 16, 128), (2, 1, 128), (65, 1, 128),
        )
    ],
    verify_seconds=8.0,
    draft=[
        DraftPoint(*point)
        for point in (
            (FULL, 1, 128), (FULL, 8, 128), (2, 8, 128), (FULL, 1, 1024), (FULL, 16, 128),
            (2, 1, 128), (4, 4, 128), (FULL, 4, 1024), (2, 16, 128),
        )
    ],
    draft_seconds=3.0,
)  # fmt: skip
"""For the start of an engine: 15 seconds in all, models and micro-benchmark included."""


def _thorough() -> Grid:
    tokens, rows, contexts = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4, 16, 32), (128, 512, 2000)
    points = [Point(*p) for p in product(tokens, rows, contexts) if p[0] >= p[1]]
    further = [point for point in points if point not in COARSE.verify]
    # In any order but that of the axes: when time runs out, all of them have been visited.
    return Grid(
        verify=[*COARSE.verify, *random.Random(0).sample(further, len(further))],
        verify_seconds=34.0,
        draft=[DraftPoint(*p) for p in product((FULL, 2, 4), (1, 4, 16, 32), contexts)],
        draft_seconds=9.0,
    )


BRIEF = (Point(1, 1, 128), Point(16, 1, 128))
"""To see whether what an earlier run learnt still holds."""

THOROUGH = _thorough()
"""For `bastion-batch calibrate`: 60 seconds in all."""


class Calibration(NamedTuple):
    """Fitted costs, and what they were fitted to."""

    costs: StepCosts
    verify_timings: list[Timing]
    draft_timings: list[Timing]


def calibrate(target: Target, drafter: Drafter | None, *, thorough: bool = False) -> StepCosts:
    """Time the engine's own passes and fit their latency models: see `measure`."""
    return measure(target, drafter, thorough=thorough).costs


@torch.inference_mode()
def measure(target: Target, drafter: Drafter | None, *, thorough: bool = False) -> Calibration:
    """Time the engine's own passes and fit their latency models.

    Args:
        target: its verification pass is timed.
        drafter: its draft pass is timed, if it has one worth pricing.
        thorough: over a finer grid, in up to 60 seconds instead of 15.
    """
    grid = THOROUGH if thorough else COARSE
    speed = device_speed(target.device, target.dtype)
    model = LatencyModel(target.shape, speed)
    verify_timings = time_verify(target, _taps(drafter), grid.verify, grid.verify_seconds)
    model.fit(verify_timings)
    # Rows that are computed one by one are neither padded nor called for.
    by_row = attends_by_row(target.device, target.dtype)
    pairs = 0 if by_row else call_pairs(target.device)
    if drafter is None or drafter.shape is None:
        return Calibration(StepCosts(model, None, pairs), verify_timings, [])
    draft = LatencyModel(drafter.shape, speed)
    draft_timings = time_draft(target, drafter, grid.draft, grid.draft_seconds)
    draft.fit(draft_timings)
    return Calibration(StepCosts(model, draft, pairs), verify_timings, draft_timings)


@torch.inference_mode()
def time_briefly(target: Target, drafter: Drafter | None) -> list[Timing]:
    """Time two short passes, to see whether costs of an earlier run still hold."""
    return time_verify(target, _taps(drafter), BRIEF, COARSE.verify_seconds)


def still_holds(costs: StepCosts, timings: Sequence[Timing]) -> bool:
    """Whether costs agree with timings, up to one factor; if it is a large one they are scaled."""
    ratios = np.array(
        [
            t.seconds / costs.verify.seconds(t.num_tokens, t.num_rows, t.context_tokens)
            for t in timings
        ]
    )
    if ratios.max() > MAX_DRIFT * ratios.min():
        return False
    common = float(np.exp(np.log(ratios).mean()))
    if not 1 / MAX_DRIFT <= common <= MAX_DRIFT:
        costs.scale(common)
    return True


def time_verify(
    target: Target, taps: tuple[int, ...], points: Iterable[Point], max_seconds: float
) -> list[Timing]:
    """Time verification passes in turn, as many as fit into `max_seconds`, the first in any case.

    Contexts beyond the target's positions are cut; points whose cache would be too large left out.
    """
    timings: list[Timing] = []
    for point in _in_time(_possible(target, points), max_seconds):
        cache = target.new_cache()
        works = [
            _fan(target, row, num_tokens, point.context)
            for row, num_tokens in enumerate(_shares(point))
        ]
        for work in works:
            work.row.slot = cache.open(point.context + len(work.token_ids))
            work.row.slot.length = point.context
        seconds = median_seconds(lambda w=works, c=cache: verify(target, c, w, taps), target.device)
        context = point.num_rows * point.context
        timings.append(Timing(point.num_tokens, point.num_rows, context, seconds))
    return timings


def time_draft(
    target: Target, drafter: Drafter, points: Iterable[DraftPoint], max_seconds: float
) -> list[Timing]:
    """Time draft passes in turn, as many as fit into `max_seconds`, the first in any case.

    Their `num_tokens` is as `DraftLoad` counts them. See `time_verify`.
    """
    num_features = len(drafter.taps) * target.stack.config.hidden_size
    timings: list[Timing] = []
    passes = (
        Point(p.num_rows * (1 + min(p.depth, drafter.depth)), p.num_rows, p.context) for p in points
    )
    for num_tokens, num_rows, context in _in_time(_possible(target, passes), max_seconds):
        features = torch.zeros(context, num_features, dtype=target.dtype, device=target.device)
        keys = [-1 - row for row in range(num_rows)]
        for key in keys:
            drafter.observe([key], [context], features)
        depth = num_tokens // num_rows - 1
        rows = [DraftRow(key, [1] * (context + 1), depth) for key in keys]
        seconds = median_seconds(lambda r=rows: drafter.draft(r), target.device)
        timings.append(Timing(num_tokens, num_rows, num_rows * context, seconds))
        for key in keys:
            drafter.forget(key)
    return timings


def _in_time(points: Iterable[Point], max_seconds: float) -> Iterator[Point]:
    """The points for which there is time, should each take as long as the longest before it."""
    start = time.perf_counter()
    longest = 0.0
    for number, point in enumerate(points):
        begun = time.perf_counter()
        if number and begun + longest > start + max_seconds:
            return
        yield point
        longest = max(longest, time.perf_counter() - begun)


def _possible(target: Target, points: Iterable[Point]) -> Iterator[Point]:
    """Each point once, within the target's positions and the bound on the cache."""
    bytes_per_token = target.new_cache().bytes_per_token
    seen: set[Point] = set()
    for point in points:
        longest = max(_shares(point))
        context = min(point.context, target.stack.config.max_positions - longest)
        cached = point.num_rows * (context + longest) * bytes_per_token
        point = point._replace(context=context)
        if context > 0 and cached <= MAX_CACHE_BYTES and point not in seen:
            seen.add(point)
            yield point


def _shares(point: Point) -> list[int]:
    """Tokens of each row, as even as can be."""
    each, left = divmod(point.num_tokens, point.num_rows)
    return [each + (row < left) for row in range(point.num_rows)]


def _fan(target: Target, key: int, num_tokens: int, context: int) -> Work:
    """A root with `num_tokens - 1` children, after a made-up context."""
    ids = (np.arange(context + 1) + key) % target.ids.vocab_size
    row = Row(Request(row_id="", prompt_ids=tuple(ids.tolist())), key, frozenset(), None)
    children = num_tokens - 1
    tree = DraftTree([-1] + [0] * children, [0] + [1] * children, [-1, *range(children)])
    return Work(row, [1] * num_tokens, tree)


def _taps(drafter: Drafter | None) -> tuple[int, ...]:
    return drafter.taps if drafter else ()
