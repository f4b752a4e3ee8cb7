"""Who decodes what, so that unequal workers finish together: every scheduling decision of a job.

Pure and deterministic: it reads no clock (every call is told the time), draws nothing at random
and calls nobody. The coordinator drives it with what workers report, and a simulator drives the
very same object. Workers are named by attempt number.

    lease      which unit a worker opens next: enough to keep it busy and to look far ahead, never
               more than its share of what is left by measured speed
    report     what it should do now (`Orders`): how many rows to run, which running rows to move,
               how many waiting rows to give to whom
    lose       a worker is gone: its units wait for another owner
    dismiss    a worker will go: all its rows move, with the tokens they have

A worker is answered in time proportional to its own rows; what concerns all workers is worked out
at most once per `PLAN_SECONDS`.
"""

import math
from array import array
from collections.abc import Collection, Iterable, Sequence

from bastion_batch.core.forecast import forecast
from bastion_batch.core.lengths import LengthModel, LengthSums, added, residual
from bastion_batch.core.moving import Mover
from bastion_batch.core.opening import Pool, is_too_slow, may_open, most_units
from bastion_batch.core.orders import (
    Eta,
    Orders,
    RowMove,
    Running,
    Share,
    Status,
    WorkerView,
)
from bastion_batch.core.rates import RateFit
from bastion_batch.core.roster import Roster, WorkerState
from bastion_batch.core.sharing import plan_gifts
from bastion_batch.core.spans import PendingUnits

__all__ = ["Balance", "Eta", "Orders", "RowMove", "Running", "Share", "Status", "WorkerView"]

PLAN_SECONDS = 1.0
MODEL_SECONDS = 5.0
MAX_OPEN_UNITS = 8
SICK_SECONDS = 10.0
TAKE_BACK_SECONDS = 30.0
"""An owner that is sick for so long loses its units to others."""
MODEL_GROWTH = 1.25
"""A model is sent when it rests on so many times as many rows as the one before."""


class Balance:
    """The one brain of a job.

    Args:
        spans: the span of every unit of the plan.
        num_outputs: outputs of every unit.
        done: units that are committed.
        max_open_units: units that a worker of mean speed may have open.
    """

    def __init__(
        self,
        *,
        spans: Sequence[int],
        num_outputs: Sequence[int],
        done: Collection[int] = (),
        max_open_units: int = MAX_OPEN_UNITS,
    ) -> None:
        self._num_outputs = array("q", num_outputs)
        self._is_done = bytearray(len(self._num_outputs))
        for unit in done:
            self._is_done[unit] = 1
        pending = [unit for unit, is_done in enumerate(self._is_done) if not is_done]
        self._pending = PendingUnits(array("q", spans), pending)
        self._num_pending_rows = sum(self._num_outputs[unit] for unit in pending)
        self._max_open_units = max_open_units
        self._owners: dict[int, int] = {}
        self._workers = Roster()
        self._sick: frozenset[int] = frozenset()
        self._mover = Mover(self._workers, self._owners)
        self._silent: list[WorkerState] = []
        self._best_row_rate: float | None = None
        self._lengths: dict[int, LengthSums] = {}
        self._model = LengthModel()
        self._longest_limit = 1
        self._planned_at = -math.inf
        self._modelled_at = -math.inf

    # Workers

    def join(self, worker: int, *, kind: str, max_batch: int, now: float) -> None:
        """A worker's engine is loaded. `kind` is its device's name: same kind, same first guess."""
        self._workers.add(WorkerState(worker, kind, max_batch, RateFit(max_batch), now, now))

    def lose(self, worker: int, done: Collection[int] = ()) -> None:
        """A worker is gone. Its units wait for another owner, but for those that are done."""
        state = self._workers.remove(worker)
        if state is None:
            return
        for unit in done:
            self.finish(unit)
        self.give_back([unit for unit in state.units if unit not in done])
        self._pending.release(worker)

    def dismiss(self, worker: int) -> None:
        """A worker will go soon: it opens nothing more, and its rows move to others."""
        state = self._workers.get(worker)
        if state is not None:
            state.is_leaving = True
            self._planned_at = -math.inf  # its next report must find where its rows go
            self._workers.recount(state)
            self._pending.release(worker)

    # Units

    def lease(self, worker: int, now: float) -> int | None:
        """The unit that this worker should open now, which it owns from here on, or None."""
        state = self._workers.get(worker)
        if state is None or state.is_leaving or not self._may_open(state):
            return None
        unit = self._pending.take(worker)
        if unit is None:
            return None
        self._owners[unit] = worker
        self._num_pending_rows -= self._num_outputs[unit]
        state.units.add(unit)
        state.leased_rows += self._num_outputs[unit]
        state.leased_tokens += self._num_outputs[unit] * self._expected_tokens()
        self._workers.recount(state)
        return unit

    def finish(self, unit: int) -> None:
        """The unit is committed, whoever owns it."""
        if self._is_done[unit]:
            return
        self._is_done[unit] = 1
        owner = self._owners.pop(unit, None)
        if owner is None:
            self._pending.remove(unit)
            self._num_pending_rows -= self._num_outputs[unit]
        else:
            self._disown(owner, unit)

    def give_back(self, units: Iterable[int]) -> None:
        """Their owner has given these units up; they wait for another."""
        for unit in list(units):
            owner = self._owners.pop(unit, None)
            if owner is None or self._is_done[unit]:
                continue
            self._disown(owner, unit)
            self._pending.put_back([unit])
            self._num_pending_rows += self._num_outputs[unit]

    def take_back(self, now: float) -> list[int]:
        """Units whose owner has been silent for too long; they wait for another from here on."""
        self._plan(now)
        units = [unit for state in self._silent for unit in sorted(state.units)]
        self.give_back(units)
        return units

    # Rows

    def report(self, worker: int, status: Status, now: float) -> Orders:
        """Take in how a worker does; what it should do."""
        state = self._workers.get(worker)
        assert state is not None, f"worker {worker} is not live"
        state.take_in(status, self._workers.prior(state.kind), now)
        self._workers.recount(state)
        if status.lengths:
            self._lengths[worker] = status.lengths
        if status.running:
            limit = max(row.facts.max_new_tokens for row in status.running)
            self._longest_limit = max(self._longest_limit, limit)
        self._plan(now)
        moves, shares = tuple(state.moves), tuple(state.shares)
        state.moves.clear()
        state.shares.clear()
        return Orders(
            max_running=0 if state.is_leaving or self._should_hold(state) else None,
            may_open=not state.is_leaving and self._may_open(state),
            oldest_first=self._num_pending_rows > 0 and len(state.units) >= self._most_units(state),
            moves=moves,
            shares=shares,
            model=self._news(state),
        )

    def other_worker(self, refused_by: Collection[int]) -> int | None:
        """Who should try a row that these workers' engines refused; None if nobody is left.

        A sick worker does only if nobody else can.
        """
        others = [
            state
            for state in self._workers
            if state.number not in refused_by and not state.is_leaving
        ]
        emptiest = min(
            others,
            key=lambda state: (state.number in self._sick, len(state.status.running)),
            default=None,
        )
        return None if emptiest is None else emptiest.number

    def sick(self, now: float) -> frozenset[int]:
        """Workers whose guests their owners should decode again: far below their own pace.

        Not a verdict: what a sick worker still sends counts, whoever is first.
        """
        self._plan(now)
        return self._sick

    def stuck(self, now: float, no_progress_seconds: float) -> list[int]:
        """Workers that have rows and have made no step for longer than this: to be ended."""
        return [s.number for s in self._workers if now - s.progressed_at > no_progress_seconds]

    # For people

    def eta(self, now: float) -> Eta | None:
        """When all will be done; None before that can be told."""
        if not self._model.num_rows:
            return None
        pending_tokens = self._num_pending_rows * self._expected_tokens()
        waiting_tokens = pending_tokens + self._workers.waiting_tokens
        return forecast(self._workers, waiting_tokens, self._tokens_left)

    def workers(self) -> dict[int, WorkerView]:
        """How fast each live worker is known to be."""
        return {state.number: state.view for state in self._workers}

    # What follows

    def _stays(self, state: WorkerState) -> bool:
        """Whether rows may be sent to a worker."""
        return not state.is_leaving and state.number not in self._sick

    def _disown(self, owner: int, unit: int) -> None:
        state = self._workers.get(owner)
        if state is not None:
            state.units.discard(unit)

    def _may_open(self, state: WorkerState) -> bool:
        """Whether a worker should have one unit more."""
        if self._should_hold(state):
            return False
        return may_open(state, self._workers, self._pool, self._most_units(state))

    def _should_hold(self, state: WorkerState) -> bool:
        """Whether a worker starts no more rows: it is cleared, or too slow for what is left."""
        if state.number in self._mover.express:
            return True
        best = self._best_row_rate
        return best is not None and is_too_slow(state, self._workers, self._pool, best)

    def _most_units(self, state: WorkerState) -> int:
        return most_units(state, self._workers, self._max_open_units)

    @property
    def _pool(self) -> Pool:
        """Units that nobody has opened."""
        longest = math.exp(min(self._model.any_mean + 3 * self._model.any_spread, 50.0))
        return Pool(
            num_units=len(self._pending),
            num_rows=self._num_pending_rows,
            row_tokens=self._expected_tokens(),
            longest_tokens=min(longest, self._longest_limit),
        )

    def _expected_tokens(self) -> float:
        """Of a row of which nothing is known."""
        model = self._model
        return residual(model.any_mean, model.any_spread, 0, self._longest_limit)

    def _tokens_left(self, row: Running) -> float:
        model = self._model
        return residual(
            model.log_mean(row.facts), model.spread, row.num_tokens, row.facts.max_new_tokens
        )

    def _news(self, state: WorkerState) -> LengthModel | None:
        """The model, if a worker should know it."""
        if self._model.num_rows <= MODEL_GROWTH * state.model_rows:
            return None
        state.model_rows = self._model.num_rows
        return self._model

    # What concerns all workers

    def _plan(self, now: float) -> None:
        if now - self._planned_at < PLAN_SECONDS:
            return
        self._planned_at = now
        if now - self._modelled_at >= MODEL_SECONDS:
            self._modelled_at = now
            self._model = LengthModel.of(added(self._lengths.values()))
        self._sick = frozenset(s.number for s in self._workers if s.is_silent(now, SICK_SECONDS))
        self._silent = [s for s in self._workers if s.is_silent(now, TAKE_BACK_SECONDS)]
        self._best_row_rate = max(
            (s.curve.per_row(s.max_batch) for s in self._workers if s.curve and self._stays(s)),
            default=None,
        )
        if not self._num_pending_rows:
            self._plan_shares(now)
        self._mover.plan(self._pool, self._sick, self._tokens_left, now)

    def _plan_shares(self, now: float) -> None:
        """Waiting rows go from those who have most to those who have too few."""
        holding = frozenset(s.number for s in self._workers if self._should_hold(s))
        for giver, taker, num_rows in plan_gifts(self._workers, holding, self._sick):
            giver.shares.append(Share(taker.number, num_rows))
            taker.promised.append((now, num_rows))
