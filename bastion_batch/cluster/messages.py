"""What workers, coordinator and driver tell each other: small, immutable, without heavy imports.

The coordinator's process imports neither torch nor pyarrow.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bastion_batch.core.lengths import LengthSums, RowFacts
from bastion_batch.core.orders import Backlog, Orders, WorkerView
from bastion_batch.records import End, EngineTotals

NO_BACKLOG = Backlog(0, 0.0)


class Suspect(NamedTuple):
    """A row that was in engines when they ended; it may be what ended them."""

    row_id: str
    sample_index: int
    ends: frozenset[End]


class Held(NamedTuple):
    """A row of a unit that a live worker has, decoding or ended, for an earlier owner."""

    row_id: str
    sample_index: int
    attempt: int


class Lease(NamedTuple):
    """A unit to decode and commit. The epoch says how many owners it has had, this one included."""

    unit: int
    epoch: int
    held: tuple[Held, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    lone_worker: bool = False
    """Whether there is no second worker on which a suspect could be tried."""


class Wait(NamedTuple):
    """Nothing to lease now; there may be later, when another worker is lost."""

    seconds: float
    """Ask again after this long."""


class Done(NamedTuple):
    """There is nothing more to do for this worker."""

    drained: bool
    """The job is being stopped, or this worker was given up; not every unit need be done."""


LeaseReply = Lease | Wait | Done


class FaultCount(NamedTuple):
    """Row faults of one kind in one unit."""

    unit: int
    kind: str
    count: int
    example: str
    """The message of one of them."""


class UnitSummary(NamedTuple):
    """What a committed unit holds."""

    num_outputs: int
    num_failed: int
    won: bool
    """False when another attempt's file was there first; it stands, and holds the same rows."""


class InFlight(NamedTuple):
    """A row that a worker has: in its engine, waiting for it, or ended and kept for its owner."""

    row_id: str
    sample_index: int
    unit: int
    epoch: int
    num_tokens: int
    """Output tokens that it has now."""
    live: bool
    """Whether the engine has it, decoding it or about to."""
    num_prompt_tokens: int = 0
    facts: RowFacts | None = None
    """What tells of its length; None once it has ended."""


class Owned(NamedTuple):
    """A unit that a worker owns, as far as it knows."""

    unit: int
    epoch: int
    num_terminal: int = 0
    """Its outputs that are terminal: part of `WorkerReport.num_uncommitted`."""


class Refused(NamedTuple):
    """A row of the sender's units that some engines could not decode, though others may."""

    unit: int
    row_id: str
    sample_index: int
    by: tuple[int, ...]
    """The attempts whose engines could not."""


class WorkerReport(NamedTuple):
    """A worker's progress since its attempt began, sent about once a second."""

    counts: EngineTotals
    num_uncommitted: int
    """Outputs that are terminal in units still open."""
    num_finished: int
    """Outputs finished by decoding, committed or not."""
    num_finished_tokens: int
    """Output tokens of those."""
    rows: tuple[InFlight, ...] = ()
    away_at: tuple[int, ...] = ()
    """Attempts that decode rows of the sender's units."""
    faults: tuple[FaultCount, ...] = ()
    """Of the units still open."""
    refused: tuple[Refused, ...] = ()
    owned: tuple[Owned, ...] = ()
    """The units that the sender has open."""
    backlog: Backlog = NO_BACKLOG
    """Rows of those that wait to start."""
    lengths: LengthSums = {}  # noqa: RUF012 - never changed
    """Of rows at the sender, whoever owns them, since its attempt began; empty if as before."""


class Ownership(NamedTuple):
    """Who owns a unit now."""

    unit: int
    epoch: int
    attempt: int


class Directions(NamedTuple):
    """The coordinator's answer to a report.

    It follows from the report and from the coordinator's state alone, so that one that is lost
    or late does no harm: the next one says it again. The moves and shares of `orders` are said
    once.
    """

    drain: bool = False
    """Move what is to move, journal what there is, commit what is complete, and end."""
    may_commit_faults: bool = False
    """Whether units with row faults may be committed: the breaker has not tripped and cannot."""
    lost: tuple[int, ...] = ()
    """Those of `away_at` that are gone or sick: their rows are the owner's to decode again."""
    owners: tuple[Ownership, ...] = ()
    """New owners of units that the sender owned, or of which it has rows."""
    released: tuple[int, ...] = ()
    """Committed units of which the sender has something: nobody needs it."""
    hopeless: tuple[Refused, ...] = ()
    """Refused rows that no other worker is left to try."""
    orders: Orders = Orders()
    """What the balance of the job asks of the sender."""

    def followed_by(self, newer: "Directions") -> "Directions":
        """Both as one: all that is said once, and otherwise the newer."""
        before, after = self.orders, newer.orders
        orders = after._replace(
            moves=before.moves + after.moves,
            shares=before.shares + after.shares,
            model=after.model or before.model,
        )
        return newer._replace(orders=orders)


class AttemptRecord(NamedTuple):
    """One incarnation of a worker, for the supervisor and for `run.json`."""

    worker: str
    attempt: int
    live: bool
    info: Mapping[str, Any]
    """The engine's description, JSON-able: device, dtype, threads, calibration, ..."""
    counts: EngineTotals
    num_units: int
    """Units it committed."""
    num_finished: int = 0
    """Outputs that it finished by decoding."""
    view: WorkerView | None = None
    """How fast it is known to be."""
    num_running: int = 0
    """Rows in its engine."""


class Progress(NamedTuple):
    """Where the job stands. Tokens and rates are this invocation's."""

    num_outputs: int
    num_done: int
    """Outputs that are terminal: committed, or waiting in an open unit for the rest of it."""
    num_committed: int
    num_failed: int
    """Failed outputs among those committed by this invocation."""
    num_units: int
    num_units_done: int
    num_workers: int
    """Workers with a loaded engine."""
    num_tokens: int
    elapsed_seconds: float
    tokens_per_second: float | None
    """Over the last half minute."""
    tokens_per_step: float | None
    mean_nodes: float | None
    speedup: float | None
    """Over plain decoding, measured; None until both have been."""
    eta_seconds: float | None
    """Until the job is done, its tail included."""
    tail_seconds: float | None = None
    """Part of that after the last row has started."""
    cost: float | None = None
    """Dollars, of this invocation's workers that have a price; None if none has."""
    failure: str | None = None
    """Why the job must stop: nearly every row fails, and of the same fault."""

    @property
    def finished(self) -> bool:
        """True when every unit is committed."""
        return self.num_units_done == self.num_units


class Place(NamedTuple):
    """Where a worker runs."""

    host: str
    pid: int


class Placed(NamedTuple):
    """A worker's process exists."""

    worker: str
    attempt: int
    place: Place
    node_id: str


class Ended(NamedTuple):
    """A worker's process is through, or gone."""

    worker: str
    attempt: int
    error: Exception | None
