"""Rows that a worker decodes for the owners of other units, and keeps until they are safe there.

A guest waits, is decoded, and has then an outcome, which goes to its owner at once and is kept
until the owner says that it is journaled or committed. When the owner is gone its rows stay: the
new owner, whose epoch is higher, asks for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bastion_batch.cluster.mail import Task
from bastion_batch.core.lengths import RowFacts
from bastion_batch.records import Outcome, Prefix, RowKey


@dataclass(slots=True)
class GuestUnit:
    """What a worker has of another worker's unit, besides the rows in its engine."""

    epoch: int
    owner: int
    waiting: dict[RowKey, Prefix] = field(default_factory=dict)
    facts: dict[RowKey, RowFacts] = field(default_factory=dict)
    """Of every row that came and is neither safe at its owner nor back there."""
    kept: dict[RowKey, Outcome] = field(default_factory=dict)


class Guests:
    """The guests by unit. A unit is known until it is committed, or nothing of it is left."""

    def __init__(self) -> None:
        self._units: dict[int, GuestUnit] = {}

    def __getitem__(self, unit: int) -> GuestUnit:
        return self._units[unit]

    def __contains__(self, unit: int) -> bool:
        return unit in self._units

    def items(self) -> Iterator[tuple[int, GuestUnit]]:
        """The units and what there is of each."""
        return iter(self._units.items())

    def bind(self, unit: int, epoch: int, owner: int) -> bool:
        """Note a unit's owner; false if a later one is known."""
        known = self._units.setdefault(unit, GuestUnit(epoch, owner))
        if epoch >= known.epoch:
            known.epoch, known.owner = epoch, owner
        return epoch >= known.epoch

    def accept(self, task: Task) -> bool:
        """Take a row in, unless it has ended here already."""
        guest = self._units[task.unit]
        is_new = task.row.key not in guest.kept and task.row.key not in guest.waiting
        if is_new:
            guest.waiting[task.row.key] = task.row
            guest.facts[task.row.key] = task.facts
        return is_new

    def next_waiting(self) -> tuple[int, Prefix, RowFacts] | None:
        """Take the row that waits longest in some unit, with that unit and the row's facts."""
        for unit, guest in self._units.items():
            if guest.waiting:
                key = next(iter(guest.waiting))
                return unit, guest.waiting.pop(key), guest.facts[key]
        return None

    def forget(self, unit: int, keys: Sequence[RowKey]) -> None:
        """The owner has these outcomes safe."""
        if unit in self._units:
            kept = self._units[unit].kept
            self.release(unit, [key for key in keys if kept.pop(key, None) is not None])

    def release(self, unit: int, keys: Sequence[RowKey]) -> None:
        """These rows are the owner's again; a unit of which nothing is left is given up."""
        guest = self._units[unit]
        for key in keys:
            guest.facts.pop(key, None)
        if not (guest.facts or guest.waiting or guest.kept):
            del self._units[unit]

    def pop(self, unit: int) -> GuestUnit | None:
        """Give up a unit: it is committed, or owned here now."""
        return self._units.pop(unit, None)
