"""What workers tell the balance of a job, and what it tells them: small and immutable."""

from collections.abc import Sequence
from typing import NamedTuple

from bastion_batch.core.lengths import LengthModel, LengthSums, RowFacts
from bastion_batch.core.rates import Fit, RateSample
from bastion_batch.core.row_order import Backlog
from bastion_batch.records import RowKey


class Running(NamedTuple):
    """A row in a worker's engine, or queued at it."""

    unit: int
    key: RowKey
    num_tokens: int
    """Output tokens now, not when it entered."""
    num_prompt_tokens: int
    facts: RowFacts


class Status(NamedTuple):
    """What a worker's report says to the balance."""

    running: Sequence[Running] = ()
    """Rows of its own units and guests that are in its engine, waiting guests too."""
    backlog: Backlog = Backlog()
    """Rows of its own units that wait to start."""
    sample: RateSample | None = None
    """Since the report before; None if it made no step."""
    lengths: LengthSums = {}  # noqa: RUF012 - never changed
    """Of rows that ended at it since its attempt began, or are live: `LengthTally.sums`."""
    num_steps: int = 0
    """Made since its attempt began."""


class RowMove(NamedTuple):
    """Have this row go on at another worker. Told to the owner of its unit."""

    unit: int
    key: RowKey
    to: int


class Share(NamedTuple):
    """Give this many of the rows that wait here to another worker. Told to their owner."""

    to: int
    num_rows: int


class Orders(NamedTuple):
    """What a worker should do now; the newest orders hold, but moves and shares are said once."""

    max_running: int | None = None
    """Start no waiting row of its own units while so many rows run; None: as many as there is room.

    Guests start regardless, and rows in the engine stay there; those leave by `RowMove` alone."""
    may_open: bool = True
    """Whether to ask for another unit, when there is memory."""
    oldest_first: bool = False
    """Whether its oldest unit is to be got done: `RowOrder.finish_oldest`."""
    moves: tuple[RowMove, ...] = ()
    shares: tuple[Share, ...] = ()
    model: LengthModel | None = None
    """To predict by from now on; None: as before."""


class Eta(NamedTuple):
    """When the job will be done."""

    seconds: float
    tail_seconds: float
    """Part of it after the last row has started."""


class WorkerView(NamedTuple):
    """What is known of a worker's speed."""

    fit: Fit | None
    tokens_per_second: float | None
    """At its batch of the last report."""
