"""The moves of running rows, from what the roster says to what owners are told.

a worker leaves      all its rows go                          `migration`
the pool runs low    a few workers are cleared for suspects   `express`
the pool is empty    rows go where all end sooner             `migration`
"""

import math
from collections.abc import Callable, Collection, Mapping

from bastion_batch.core.express import pick_lanes, plan_express, suspects
from bastion_batch.core.migration import Candidate, Lane, Planned, plan_moves
from bastion_batch.core.opening import Pool
from bastion_batch.core.orders import RowMove, Running
from bastion_batch.core.roster import Roster, WorkerState
from bastion_batch.core.sharing import RESERVE_SECONDS
from bastion_batch.records import RowKey

HYSTERESIS_SECONDS = 5.0
"""A row that was moved stays so long where it is."""
MAX_MOVES_PER_PLAN = 64


class Mover:
    """Plans the moves of a job.

    Args:
        roster: the live workers; the moves are left with the owners' states.
        owners: of every open unit.
    """

    def __init__(self, roster: Roster, owners: Mapping[int, int]) -> None:
        self.express: frozenset[int] = frozenset()
        """Workers that start no rows, to be fast for those that may end last."""
        self._workers = roster
        self._owners = owners
        self._moved_at: dict[RowKey, float] = {}

    def plan(
        self, pool: Pool, sick: Collection[int], tokens_left: Callable[[Running], float], now: float
    ) -> None:
        """Plan the moves of one moment.

        Args:
            pool: what nobody has opened.
            sick: workers that no row may be sent to.
            tokens_left: expected of a running row.
            now: seconds.
        """
        self._moved_at = {
            key: at for key, at in self._moved_at.items() if now - at < HYSTERESIS_SECONDS
        }
        self._sick, self._tokens_left, self._now = sick, tokens_left, now
        is_tail = self._is_tail(pool)
        if is_tail or any(state.is_leaving for state in self._workers):
            lanes = [self._lane(state, is_tail=is_tail) for state in self._workers]
            planned = plan_moves(lanes, MAX_MOVES_PER_PLAN)
        else:
            self._clear_lanes(pool)
            lanes = [self._suspects_lane(state) for state in self._workers if self.express]
            planned = plan_express(lanes, self.express)
        for move in planned:
            self._order(move)

    def _is_tail(self, pool: Pool) -> bool:
        """Whether slots are free and what waits would soon be gone."""
        rate = self._workers.full_rate
        if pool.num_rows or rate is None:
            return False
        if self._workers.waiting_tokens > RESERVE_SECONDS * rate:
            return False
        return any(
            state.num_running + state.waiting_rows < state.max_batch and not state.is_leaving
            for state in self._workers
        )

    def _clear_lanes(self, pool: Pool) -> None:
        """As the pool runs low, a few workers are cleared; they stay so while they are fit."""
        rate = self._workers.full_rate
        staying = [state for state in self._workers if not self._is_closed(state)]
        self.express &= frozenset(state.number for state in staying)
        if rate is None or self.express:
            return
        seconds = (pool.num_tokens + self._workers.waiting_tokens) / rate
        if seconds > RESERVE_SECONDS:
            self.express = pick_lanes(staying, rate, seconds, pool.longest_tokens)

    def _is_closed(self, state: WorkerState) -> bool:
        """Whether no row may be sent to a worker."""
        return state.is_leaving or state.number in self._sick

    def _lane(self, state: WorkerState, *, is_tail: bool) -> Lane:
        """A worker for `plan_moves`: before the tail, only rows of one that leaves may go."""
        lane = self._bare_lane(state)
        if not is_tail and not state.is_leaving:
            return lane
        candidates = [Candidate(row, self._tokens_left(row)) for row in state.status.running]
        lane.tokens_left = state.waiting_tokens + sum(left for _, left in candidates)
        lane.longest = max((left for _, left in candidates), default=0.0)
        lane.candidates = [c for c in candidates if self._may_move(c.row)]
        lane.candidates.sort(key=lambda candidate: candidate.tokens_left)
        return lane

    def _suspects_lane(self, state: WorkerState) -> Lane:
        """A worker for `plan_express`."""
        lane = self._bare_lane(state)
        if state.number in self.express:
            lane.num_rows = state.num_running
        else:
            rows = (row for row in state.status.running if self._may_move(row))
            lane.candidates = suspects(rows, self._tokens_left)
        return lane

    def _bare_lane(self, state: WorkerState) -> Lane:
        return Lane(
            worker=state.number,
            curve=self._workers.assumed_curve(state),
            max_batch=state.max_batch,
            num_rows=state.num_running + state.waiting_rows,
            is_leaving=state.is_leaving,
            is_closed=self._is_closed(state),
        )

    def _may_move(self, row: Running) -> bool:
        """Whether a row has an owner, and was not moved just now."""
        is_fresh = self._now - self._moved_at.get(row.key, -math.inf) < HYSTERESIS_SECONDS
        return not is_fresh and row.unit in self._owners

    def _order(self, planned: Planned) -> None:
        row = planned.row
        owner = self._workers.get(self._owners[row.unit])
        if owner is None:
            return
        owner.moves.append(RowMove(row.unit, row.key, planned.target))
        self._moved_at[row.key] = self._now
        target = self._workers.get(planned.target)
        assert target is not None, "rows go to live workers"
        target.coming[row.key] = self._now
