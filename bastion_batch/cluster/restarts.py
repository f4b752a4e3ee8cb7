"""When a worker is started again, and when it is given up.

A worker that dies is replaced after a pause. One that dies three times in a row without having
committed a unit is removed; so is one whose fault a new start cannot mend.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_FRUITLESS_STARTS = 3
ATTEMPTS_PER_INVOCATION = 65536


@dataclass(slots=True)
class _State:
    starts_at: float | None = 0.0
    """None while it runs and after it is removed or has finished."""
    num_fruitless: int = 0
    removed: bool = False


class Restarts:
    """Decides for each worker by name. No clock: every call is told the time."""

    def __init__(
        self, workers: Iterable[str], invocation: int, *, pause_seconds: float = 1.0
    ) -> None:
        """All workers are due at once. A pause doubles with every fruitless start."""
        self._states = {worker: _State() for worker in workers}
        self._next_attempt = invocation * ATTEMPTS_PER_INVOCATION
        self._pause_seconds = pause_seconds

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
        """Note a death, after a unit was committed or not. Whether the worker is now removed."""
        state = self._states[worker]
        state.num_fruitless = 0 if fruitful else state.num_fruitless + 1
        if not mendable or state.num_fruitless >= MAX_FRUITLESS_STARTS:
            state.removed, state.starts_at = True, None
        else:
            state.starts_at = now + self._pause_seconds * 2**state.num_fruitless / 2
        return state.removed
