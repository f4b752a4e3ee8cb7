"""When a worker is started again, and when it is given up.

A worker that dies is replaced after a pause. One that dies three times in a row without having
finished a row is removed, whether it failed to start or died later; so is one whose fault a new
start cannot mend.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bastion_batch.io.layout import ATTEMPTS_PER_INVOCATION

MAX_FRUITLESS_STARTS = 3


@dataclass(slots=True)
class _State:
    starts_at: float | None = 0.0
    """None while it runs and after it is removed or has finished."""
    num_fruitless: int = 0
    removed: bool = False


class Restarts:
    """Decides for each worker by name. No clock: every call is told the time."""

    def __init__(
        self,
        workers: Iterable[str],
        invocation: int,
        *,
        pause_seconds: float = 1.0,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """All workers are due at once.

        Args:
            workers: their names.
            invocation: numbers the attempts.
            pause_seconds: before a start; doubles with every fruitless one, and is longer by up
                to a half, by chance, so that workers that died together do not start together.
            rng: uniform in [0, 1).
        """
        self._states = {worker: _State() for worker in workers}
        self._next_attempt = invocation * ATTEMPTS_PER_INVOCATION
        self._pause_seconds = pause_seconds
        self._rng = rng

    def add(self, worker: str) -> None:
        """One more worker, due at once."""
        self._states[worker] = _State()

    @property
    def all_removed(self) -> bool:
        """Whether no worker is left."""
        return all(state.removed for state in self._states.values())

    def due(self, now: float) -> list[str]:
        """Workers to start now."""
        return [
            worker
            for worker, state in self._states.items()
            if state.starts_at is not None and state.starts_at <= now
        ]

    def started(self, worker: str) -> int:
        """Note a start; returns the number of this attempt, unique over the output's life."""
        self._states[worker].starts_at = None
        self._next_attempt += 1
        return self._next_attempt

    def died(self, worker: str, now: float, *, fruitful: bool, mendable: bool = True) -> bool:
        """Note a death, after a row was finished or not. Whether the worker is now removed."""
        state = self._states[worker]
        state.num_fruitless = 0 if fruitful else state.num_fruitless + 1
        if not mendable or state.num_fruitless >= MAX_FRUITLESS_STARTS:
            state.removed, state.starts_at = True, None
        else:
            pause = self._pause_seconds * 2**state.num_fruitless / 2
            state.starts_at = now + pause * (1 + self._rng() / 2)
        return state.removed

    def left(self, worker: str, now: float) -> None:
        """Note that it ended as it was told to, its machine going away: no fault of its own."""
        self._states[worker].starts_at = now
