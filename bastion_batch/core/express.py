"""Before the pool is empty, a few workers run few rows, fast: those that may end last.

What ends a job is a handful of rows that turn out far longer than was to be expected. They show
by the tokens that they have, but a worker whose batch is full decodes them no faster than any
other row. So, as the pool runs low, a small part of the workers starts no more rows, and as they
empty the suspects of all the others go there. What that costs is what those workers' batches
lack; what it saves is most of the time that all others would wait for such rows in the end.

    pool runs low        lanes empty           suspects move in       pool empty: `migration`
    -------------------> ------------------->  -------------------->
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from bastion_batch.core.migration import MARGIN_SECONDS, Candidate, Lane, Planned, moved
from bastion_batch.core.orders import Running
from bastion_batch.core.rates import RateCurve
from bastion_batch.core.roster import WorkerState

LEAD = 0.4
"""Lanes are cleared so much before the pool is empty, as a share of what the longest row takes."""
MAX_RATE_SHARE = 0.1
"""Of the rate of all workers, what lanes together are at most worth."""
MIN_SPEEDUP = 1.5
"""In a lane a row is at least so many times as fast as in any full batch."""
SUSPECTS = 8
"""Rows of a worker that are looked at: those with the most tokens."""


def pick_lanes(
    workers: Iterable[WorkerState], total_rate: float, pool_seconds: float, longest_tokens: float
) -> frozenset[int]:
    """The workers to clear now: those that lose least for what a row gains there.

    A lane is to hold `half` rows: its worker then makes half of what it can, and each row goes
    half as fast as it would alone.

    Args:
        workers: that may be sent rows.
        total_rate: tokens per second of all.
        pool_seconds: until no row waits.
        longest_tokens: of about the longest row.
    """
    known = [(state.number, state.curve, state.max_batch) for state in workers if state.curve]
    usual = max((curve.per_row(max_batch) for _, curve, max_batch in known), default=0.0)
    lanes: list[int] = []
    rate = 0.0
    for number, curve, max_batch in sorted(known, key=lambda lane: (_loss(*lane[1:]), lane[0])):
        row_rate = curve.per_row(curve.half)
        if row_rate < MIN_SPEEDUP * usual or pool_seconds > LEAD * longest_tokens / row_rate:
            continue
        rate += curve.total(max_batch)
        if rate > MAX_RATE_SHARE * total_rate:
            break
        lanes.append(number)
    return frozenset(lanes)


def suspects(rows: Iterable[Running], tokens_left: Callable[[Running], float]) -> list[Candidate]:
    """The rows of a worker that may end last, the one with most left last."""
    oldest = heapq.nlargest(SUSPECTS, rows, key=attrgetter("num_tokens"))
    found = [Candidate(row, tokens_left(row)) for row in oldest]
    return sorted(found, key=attrgetter("tokens_left"))


def plan_express(lanes: Sequence[Lane], express: Collection[int]) -> list[Planned]:
    """The suspects that go to the cleared lanes now; the lanes are changed as if they had."""
    targets = [lane for lane in lanes if lane.worker in express and lane.has_room]
    sources = [
        (-lane.candidates[-1].tokens_left, lane.worker, lane)
        for lane in lanes
        if lane.candidates and lane.worker not in express
    ]
    heapq.heapify(sources)
    moves = []
    for target in targets:
        row_rate = target.curve.per_row(target.curve.half)
        while sources and target.num_rows < target.curve.half:
            _, worker, source = heapq.heappop(sources)
            row, tokens_left = source.candidates[-1]
            here_seconds = tokens_left / source.curve.per_row(source.max_batch)
            there_seconds = tokens_left / row_rate + target.cost_seconds(row)
            if here_seconds <= there_seconds + MARGIN_SECONDS:
                continue  # nor is it worth while for any other of this worker's rows
            moves.append(moved(source, target))
            if source.candidates:
                heapq.heappush(sources, (-source.candidates[-1].tokens_left, worker, source))
    return moves


def _loss(curve: RateCurve, max_batch: int) -> float:
    """Tokens per second of all that are lost for each that a row gains."""
    return (curve.total(max_batch) - curve.total(curve.half)) / curve.per_row(curve.half)
