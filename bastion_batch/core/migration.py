"""Which running rows go on elsewhere, once nothing waits to start.

A batch that drains goes ever faster for the rows that are left. Between two ends it takes
`(b + half) / saturated` seconds a token for `b` rows, so that a worker is done after

    (tokens left of all its rows + half * tokens left of the longest) / saturated

seconds. The job ends with the worker that is done last. So the row with most left leaves the
worker that would be done last for the one that would then be done first, if all are done sooner
by more than the move costs: the transfer, its prompt and tokens read again, and a margin against
moving to and fro.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bastion_batch.core.orders import Running
from bastion_batch.core.rates import RateCurve

TRANSFER_SECONDS = 1.0
MARGIN_SECONDS = 1.0
MAX_TARGETS = 32
"""Workers that a row is weighed for: those that would be done first."""


class Candidate(NamedTuple):
    """A running row, and what is expected of it."""

    row: Running
    tokens_left: float


@dataclass(slots=True)
class Lane:
    """A worker as the planner of moves sees it."""

    worker: int
    curve: RateCurve
    max_batch: int
    num_rows: int
    """Running, those on their way included."""
    tokens_left: float = 0.0
    """Expected of all its rows, those that wait there too."""
    longest: float = 0.0
    """Expected of the row with most left."""
    candidates: list[Candidate] = field(default_factory=list)
    """Rows that may leave, the one with most left last."""
    is_leaving: bool = False
    """Whether all its rows must go."""
    is_closed: bool = False
    """Whether no row may come."""

    @property
    def has_room(self) -> bool:
        """Whether one row more could run here at once."""
        return not self.is_closed and self.num_rows < self.max_batch

    @property
    def seconds(self) -> float:
        """Until its last row ends."""
        return (self.tokens_left + self.curve.half * self.longest) / self.curve.saturated

    def seconds_with(self, candidate: Candidate) -> float:
        """The same, if this row came."""
        longest = max(self.longest, candidate.tokens_left)
        work = self.tokens_left + candidate.tokens_left + self.curve.half * longest
        return work / self.curve.saturated + self.cost_seconds(candidate.row)

    def cost_seconds(self, row: Running) -> float:
        """Until a row goes on here."""
        return TRANSFER_SECONDS + (row.num_prompt_tokens + row.num_tokens) / self.curve.prefill


class Planned(NamedTuple):
    """A row that is to move."""

    row: Running
    source: int
    target: int


def plan_moves(lanes: Sequence[Lane], max_moves: int) -> list[Planned]:
    """The moves to make now: all of those who leave, and at most so many others.

    The lanes are changed as if the moves were made.
    """
    moves = [move for lane in lanes if lane.is_leaving for move in _evacuated(lane, lanes)]
    sources = [
        (-lane.seconds, lane.worker, lane)
        for lane in lanes
        if lane.candidates and not lane.is_leaving
    ]
    heapq.heapify(sources)
    roomy = [lane for lane in lanes if lane.has_room]
    targets = heapq.nsmallest(MAX_TARGETS, roomy, key=lambda lane: (lane.seconds, lane.worker))
    num_moves = 0
    while sources and num_moves < max_moves:
        negative_seconds, _, source = heapq.heappop(sources)
        found = _soonest(targets, source)
        if found is None or -negative_seconds <= found[0] + MARGIN_SECONDS:
            continue
        moves.append(moved(source, found[1]))
        num_moves += 1
        if source.candidates:
            heapq.heappush(sources, (-source.seconds, source.worker, source))
    return moves


def moved(source: Lane, target: Lane) -> Planned:
    """Move the row with most left."""
    row, tokens_left = source.candidates.pop()
    source.num_rows -= 1
    source.tokens_left -= tokens_left
    source.longest = source.candidates[-1].tokens_left if source.candidates else 0.0
    target.num_rows += 1
    target.tokens_left += tokens_left
    target.longest = max(target.longest, tokens_left)
    return Planned(row, source.worker, target.worker)


def _soonest(targets: Sequence[Lane], source: Lane) -> tuple[float, Lane] | None:
    """Who would be done first with the source's longest row, and when; None if nowhere is room."""
    candidate = source.candidates[-1]
    others = [
        (lane.seconds_with(candidate), lane.worker, lane)
        for lane in targets
        if lane is not source and lane.has_room
    ]
    if not others:
        return None
    seconds, _, lane = min(others)
    return seconds, lane


def _evacuated(source: Lane, lanes: Sequence[Lane]) -> list[Planned]:
    """All rows of a worker that leaves, to where they will be decoded first, room or not."""
    queue = [
        ((lane.num_rows + 1) / lane.curve.total(lane.max_batch), lane.worker, lane)
        for lane in lanes
        if not lane.is_closed
    ]
    heapq.heapify(queue)
    moves = []
    while queue and source.candidates:
        _, worker, target = queue[0]
        moves.append(moved(source, target))
        load = (target.num_rows + 1) / target.curve.total(target.max_batch)
        heapq.heapreplace(queue, (load, worker, target))
    return moves
