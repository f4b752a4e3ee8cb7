"""What workers tell each other about a row that is decoded away from its unit's owner.

    owner                         decoder
      | Task -------------------->|   decode this row for me
      |<---------------- Outcomes |   ended; kept there until acknowledged
      | Ack --------------------->|   journaled or committed: forget it
      | Recall ------------------>|   give it back as it is
      |<---------------- Returned |   not ended here: it goes on elsewhere
      | Ask --------------------->|   I own the unit now, or have not heard from you for long
      |<------- Outcomes, Holding |   what you have for it, again, and what you are decoding

Every message may be lost, repeated, late or overtaken: each names the unit and its owner's epoch.
One of an older epoch is dropped and counted, a repeated one changes nothing, and a lost one is
made up for by the next `Ask`. Input columns never travel: they are the owner's.
"""

from typing import NamedTuple

from bastion_batch.core.lengths import RowFacts
from bastion_batch.records import Outcome, Prefix, RowFault, RowKey


class Task(NamedTuple):
    """A row to decode for another worker's unit."""

    unit: int
    epoch: int
    owner: int
    """The attempt that its outcome goes to."""
    row: Prefix
    facts: RowFacts
    """What tells of its length."""


class Outcomes(NamedTuple):
    """Rows that have ended at the sender."""

    unit: int
    epoch: int
    sender: int
    outcomes: tuple[Outcome, ...]


class Returned(NamedTuple):
    """Rows that the sender will not end."""

    unit: int
    epoch: int
    sender: int
    rows: tuple[Prefix, ...]
    refusal: RowFault | None = None
    """Why its engine cannot decode them; None when it was asked for them, or leaves."""


class Ack(NamedTuple):
    """Outcomes that need not be kept any longer."""

    unit: int
    keys: tuple[RowKey, ...]


class Recall(NamedTuple):
    """Rows to give back."""

    unit: int
    epoch: int
    keys: tuple[RowKey, ...]


class Ask(NamedTuple):
    """What do you have of this unit? Its owner has this epoch."""

    unit: int
    epoch: int
    owner: int


class Holding(NamedTuple):
    """All the rows of this unit that the sender is decoding now."""

    unit: int
    epoch: int
    sender: int
    keys: tuple[RowKey, ...]


Mail = Task | Outcomes | Returned | Ack | Recall | Ask | Holding
