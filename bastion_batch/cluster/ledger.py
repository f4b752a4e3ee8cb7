"""What an invocation's workers hold, for how long, and what that costs.

A worker holds its place from the moment it is there, its models still to be loaded, to its end:
that is what a machine's owner is paid for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bastion_batch.cluster.placement import Slot


class Held(NamedTuple):
    """What one incarnation of a worker has held so far."""

    worker: str
    attempt: int
    pool: str
    price_per_hour: float | None
    seconds: float
    holds: bool
    """Whether it still does."""

    @property
    def cost(self) -> float | None:
        """Dollars, or None without a price."""
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600


@dataclass(slots=True)
class _Entry:
    slot: Slot
    since: float
    until: float | None = None


class Ledger:
    """Keeps the accounts of one invocation. No clock: every call is told the time."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def placed(self, attempt: int, slot: Slot, now: float) -> None:
        """The worker of this slot is there."""
        self._entries.setdefault(attempt, _Entry(slot, now))

    def ended(self, attempt: int, now: float) -> None:
        """It is gone; one that never had a place cost nothing."""
        entry = self._entries.get(attempt)
        if entry is not None and entry.until is None:
            entry.until = now

    def held(self, now: float) -> list[Held]:
        """Every incarnation that has had a place, in order of attempt."""
        return [
            Held(
                worker=entry.slot.worker,
                attempt=attempt,
                pool=entry.slot.pool.name,
                price_per_hour=entry.slot.pool.config.price_per_hour,
                seconds=(now if entry.until is None else entry.until) - entry.since,
                holds=entry.until is None,
            )
            for attempt, entry in sorted(self._entries.items())
        ]


def total_cost(held: Iterable[Held]) -> float | None:
    """Dollars of all that have a price; None if none has."""
    costs = [one.cost for one in held if one.cost is not None]
    return sum(costs) if costs else None
