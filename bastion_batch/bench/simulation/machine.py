"""A fake engine in continuous time: every row of its batch advances at the same rate.

Virtual time counts the tokens that a row decoding since the beginning would have. A row ends when
virtual time reaches its start's plus the tokens it lacks, so that nothing is done per row between
two events. A prompt stops the whole batch for as long as it takes.
"""

import heapq
from typing import NamedTuple

from bastion_batch.bench.simulation.workers import SimulatedWorker

STEPS_PER_SECOND = 20.0
EPSILON = 1e-6
"""Of a token: a row this close to its end has ended."""


class RunningRow(NamedTuple):
    """A row in a machine."""

    base: float
    """Virtual time at which it would have had no token."""
    end: float
    """Virtual time at which it has all."""


class Machine:
    """One worker's engine."""

    __slots__ = (
        "_debt", "_heap", "_rate", "_unread", "busy_seconds", "prefilled", "row_steps", "rows",
        "speed", "steps", "time", "tokens", "virtual", "worker",
    )  # fmt: skip

    def __init__(self, worker: SimulatedWorker, now: float) -> None:
        self.worker = worker
        self.time = now
        self.virtual = 0.0
        self.rows: dict[int, RunningRow] = {}
        self.tokens = 0.0
        self.busy_seconds = 0.0
        self.row_steps = 0.0
        """Steps, each times the rows there."""
        self.prefilled = 0.0
        """Prompt tokens read, those of moved rows' outputs too."""
        self.steps = 0.0
        """Made, prompts read in them too."""
        self.speed = 1.0
        """What is left of its rate: less than 1 when it is sick."""
        self._heap: list[tuple[float, int]] = []
        self._debt = 0.0
        """Seconds that the batch has still to wait, for prompts above all."""
        self._unread = 0.0
        """Prompt tokens still to be read."""
        self._rate = 0.0

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self.worker.max_batch - len(self.rows)

    def advance(self, now: float) -> None:
        """Go on decoding until now."""
        seconds = now - self.time
        self.time = now
        if not seconds or not self.rows:
            return
        self.busy_seconds += seconds
        steps = seconds * self.speed * STEPS_PER_SECOND
        self.steps += steps
        self.row_steps += steps * len(self.rows)
        if self._debt:
            paid = min(seconds, self._debt)
            read = self._unread * paid / self._debt
            self.prefilled += read
            self._unread -= read
            self._debt -= paid
            seconds -= paid
        gained = seconds * self._rate
        self.virtual += gained
        self.tokens += gained * len(self.rows)

    def start(self, row: int, num_tokens: float, length: int, num_prompt_tokens: int) -> None:
        """Take in a row that has some tokens and ends with `length`; prefills all that it has."""
        num_read = num_prompt_tokens + num_tokens
        self._unread += num_read
        self._debt += num_read / (self.worker.prefill_rate * max(self.speed, EPSILON))
        base = self.virtual - num_tokens
        running = RunningRow(base, base + length)
        self.rows[row] = running
        heapq.heappush(self._heap, (running.end, row))
        self._set_rate()

    def remove(self, row: int) -> int:
        """Let go of a row that has not ended; returns its whole tokens."""
        running = self.rows.pop(row)
        self._set_rate()
        return max(0, int(self.virtual - running.base + EPSILON))

    def stall(self, seconds: float) -> None:
        """Be held up by something other than decoding, if it decodes."""
        if self.rows:
            self._debt += seconds

    def clear(self) -> None:
        """Lose everything."""
        self.rows.clear()
        self._heap.clear()
        self._set_rate()

    def tokens_of(self, row: int) -> int:
        """Whole tokens that a row has now."""
        return max(0, int(self.virtual - self.rows[row].base + EPSILON))

    def pop_finished(self) -> list[int]:
        """Let go of the rows that have ended."""
        finished = []
        heap, rows, virtual = self._heap, self.rows, self.virtual + EPSILON
        while heap and heap[0][0] <= virtual:
            end, row = heapq.heappop(heap)
            running = rows.get(row)
            if running is not None and running.end == end:
                del rows[row]
                finished.append(row)
        if finished:
            self._set_rate()
        return finished

    def next_finish(self) -> float | None:
        """When the next row ends if nothing changes, or None if none does."""
        heap, rows = self._heap, self.rows
        while heap:
            end, row = heap[0]
            running = rows.get(row)
            if running is not None and running.end == end:
                if not self._rate:
                    return None
                return self.time + self._debt + max(0.0, end - self.virtual) / self._rate
            heapq.heappop(heap)
        return None

    def set_speed(self, speed: float) -> None:
        """Be sick, or well again."""
        self.speed = speed
        self._set_rate()

    def _set_rate(self) -> None:
        worker = self.worker
        num_rows = len(self.rows)
        self._rate = self.speed * worker.saturated / (num_rows + worker.half) if num_rows else 0.0
        if not num_rows:
            self._debt = self._unread = 0.0
