"""Rows that a worker decodes for the owners of other units, and keeps until they are safe there.

A guest waits, is decoded, and has then an outcome, which goes to its owner at once and is kept
until the owner says that it is journaled or committed. When the owner is gone its rows stay: the
new owner, whose epoch is higher, asks for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bastion_batch.cluster.mail import Task
from bastion_batch.records import Outcome, Prefix, RowKey


@dataclass(slots=True)
class GuestUnit:
    """What a worker has of another worker's unit, besides the rows in its engine."""

    epoch: int
    owner: int
    waiting: dict[RowKey, Prefix] = field(default_factory=dict)
    kept: dict[RowKey, Outcome] = field(default_factory=dict)


class Guests:
    """The guests by unit. A unit is known as long as it is not committed, for its epoch."""

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
        return is_new

    def next_waiting(self) -> tuple[int, Prefix] | None:
        """Take the row that waits longest in some unit, with that unit."""
        for unit, guest in self._units.items():
            if guest.waiting:
                return unit, guest.waiting.pop(next(iter(guest.waiting)))
        return None

    def forget(self, unit: int, keys: Sequence[RowKey]) -> None:
        """The owner has these outcomes safe."""
        if unit in self._units:
            for key in keys:
                self._units[unit].kept.pop(key, None)

    def pop(self, unit: int) -> GuestUnit | None:
        """Give up a unit: it is committed, or owned here now."""
        return self._units.pop(unit, None)
