"""How a simulated job went: for the picture, the table and the bill."""

from dataclasses import dataclass, field
from typing import NamedTuple

from bastion_batch.bench.simulation.machine import Machine


@dataclass(slots=True)
class Trace:
    """What one worker did, for the picture and the bill."""

    held_from: float
    held_until: float | None = None
    first_start: float | None = None
    samples: list[tuple[float, float]] = field(default_factory=list)
    """Seconds, and the share of slots taken."""
    marks: list[tuple[float, str]] = field(default_factory=list)


class Outcome(NamedTuple):
    """How a job went."""

    makespan_seconds: float
    num_finished: int
    num_moves: int
    num_lost_tokens: int
    """Decoded, and decoded again by another worker."""
    tokens: float
    machines: tuple[Machine, ...]
    traces: tuple[Trace, ...]

    @property
    def held_seconds(self) -> float:
        """Of all workers, until they were lost or the job ended."""
        return sum(
            (self.makespan_seconds if t.held_until is None else t.held_until) - t.held_from
            for t in self.traces
        )

    @property
    def idle_share(self) -> float:
        """Of the time that workers were held: without any row."""
        return 1 - sum(m.busy_seconds for m in self.machines) / self.held_seconds

    @property
    def cost(self) -> float:
        """Of the hours that workers were held."""
        ends = (
            self.makespan_seconds if t.held_until is None else t.held_until for t in self.traces
        )
        return sum(
            (end - trace.held_from) / 3600 * machine.worker.price_per_hour
            for end, trace, machine in zip(ends, self.traces, self.machines, strict=True)
        )
