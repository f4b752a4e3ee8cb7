"""Who gives waiting rows to whom, once no unit is left to open.

Two needs. A worker that is about to have nothing to start is sent rows in time. And all workers
should be equally far down the list of rows, so that none still starts long ones while others have
only short ones left: who has less to do than the rest, for its speed, is sent rows ahead of need.
"""

import heapq
import math
from collections.abc import Collection
from typing import NamedTuple

from bastion_batch.core.roster import Roster, WorkerState

RESERVE_SECONDS = 3.0
"""Work that a worker has ready beyond its slots: longer than it takes to have more sent."""
UNEVEN_SHARE, UNEVEN_SECONDS = 0.05, 2.0
"""A worker is sent rows ahead of need when its time left lies so far below the common one."""


class Gift(NamedTuple):
    """Rows to give."""

    giver: WorkerState
    taker: WorkerState
    num_rows: int


def plan_gifts(
    roster: Roster, holding: Collection[int] = (), sick: Collection[int] = ()
) -> list[Gift]:
    """What should be given now, in time `W log W` for W workers and about as many gifts.

    Args:
        roster: the workers.
        holding: workers that start no row any more: they keep none, and are given none.
        sick: workers that neither give nor take.
    """
    rate = roster.full_rate
    if not roster.waiting_rows or rate is None:
        return []
    mean_tokens = max(roster.waiting_tokens / roster.waiting_rows, 1.0)
    even_seconds = roster.waiting_tokens / rate
    mean_rate = rate / max(len(roster), 1)
    givers: list[tuple[float, int, int, WorkerState]] = []
    for state in roster:
        own_rate = state.full_rate or mean_rate
        is_out = state.is_leaving or state.number in holding
        reserve = 0 if is_out else _reserve_rows(own_rate, mean_tokens)
        surplus = state.status.backlog.num_rows - reserve
        if surplus > 0 and state.number not in sick:
            seconds = math.inf if is_out else state.waiting_tokens / own_rate
            givers.append((-seconds, state.number, surplus, state))
    heapq.heapify(givers)
    gifts: list[Gift] = []
    for state in roster:
        if state.is_leaving or state.number in holding or state.number in sick:
            continue
        own_rate = state.full_rate or mean_rate
        seconds = state.waiting_tokens / own_rate
        wanted = state.max_batch + _reserve_rows(own_rate, mean_tokens) - state.num_running
        if seconds > (1 - UNEVEN_SHARE) * even_seconds - UNEVEN_SECONDS:
            wanted -= state.waiting_rows
        while wanted > 0 and givers and -givers[0][0] > seconds:
            negative_seconds, number, surplus, giver = givers[0]
            given = min(wanted, surplus)
            gifts.append(Gift(giver, state, given))
            wanted -= given
            left = negative_seconds + given * mean_tokens / (giver.full_rate or mean_rate)
            if given < surplus:
                heapq.heapreplace(givers, (left, number, surplus - given, giver))
            else:
                heapq.heappop(givers)
    return gifts


def _reserve_rows(rate: float, mean_tokens: float) -> int:
    """Rows that a worker starts while more are on their way."""
    return 2 + math.ceil(RESERVE_SECONDS * rate / mean_tokens)
