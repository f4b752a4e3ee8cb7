"""When a worker opens another unit, and when it starts no more rows."""

import math
from typing import NamedTuple

from bastion_batch.core.roster import Roster, WorkerState
from bastion_batch.core.sharing import RESERVE_SECONDS

LOOKAHEAD = 1.5
"""A worker opens units this many times as far ahead as its longest row may take."""
HOLD_RATIO = 2.0
"""A worker that takes so many times as long as the others would starts no more rows."""


class Pool(NamedTuple):
    """Units that nobody has opened."""

    num_units: int
    num_rows: int
    row_tokens: float
    """Expected of a row of which nothing is known."""
    longest_tokens: float
    """Of about the longest row of a thousand."""

    @property
    def num_tokens(self) -> float:
        """Expected of all rows."""
        return self.num_rows * self.row_tokens


def may_open(state: WorkerState, roster: Roster, pool: Pool, max_units: int) -> bool:
    """Whether a worker that starts rows should have one unit more, of at most so many."""
    if not pool.num_rows:
        return False
    if state.num_running + state.waiting_rows < state.max_batch + 2:
        return True  # its engine is not full, or just so
    curve, total_rate = state.curve, roster.full_rate
    if curve is None or total_rate is None or len(state.units) >= max_units:
        return False
    rate = curve.total(state.max_batch)
    seconds = state.waiting_tokens / rate
    if seconds < RESERVE_SECONDS:
        return True
    fair_tokens = rate / total_rate * (pool.num_tokens + roster.waiting_tokens)
    unit_tokens = pool.num_tokens / pool.num_units
    is_fair = state.waiting_tokens + unit_tokens / 2 <= fair_tokens
    # The longest row must be able to start so early that it does not end last.
    lookahead_seconds = LOOKAHEAD * pool.longest_tokens / curve.per_row(state.max_batch)
    return is_fair and seconds < lookahead_seconds


def most_units(state: WorkerState, roster: Roster, mean_units: int) -> int:
    """Units that a worker may have open: the same work, in time, for each."""
    rate, mean = state.full_rate, roster.mean_rate
    if rate is None or mean is None:
        return mean_units
    return max(2, math.ceil(mean_units * rate / mean))


def is_too_slow(state: WorkerState, roster: Roster, pool: Pool, best_row_rate: float) -> bool:
    """Whether a row that starts here would end long after all could be done without this worker.

    The fastest never is, so that the pool is never idle while rows wait. Nor are workers not much
    slower than it: a row started there keeps its slot busy, and moves later.

    Args:
        state: of the worker.
        roster: all workers.
        pool: what nobody has opened.
        best_row_rate: tokens per second of a row in the full batch of the fastest worker.
    """
    curve, total_rate = state.curve, roster.full_rate
    if curve is None or total_rate is None:
        return False
    others_seconds = (pool.num_tokens + roster.waiting_tokens) / total_rate
    backlog = state.status.backlog
    tokens = backlog.num_tokens / backlog.num_rows if backlog.num_rows else pool.row_tokens
    elsewhere_seconds = others_seconds + tokens / best_row_rate
    return tokens / curve.per_row(state.max_batch) > HOLD_RATIO * elsewhere_seconds
