"""What workers, coordinator and driver tell each other: small, immutable, without heavy imports.

The coordinator's process imports neither torch nor pyarrow.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bastion_batch.records import EngineTotals


class Lease(NamedTuple):
    """A unit to decode and commit. The epoch says how many owners it has had, this one included."""

    unit: int
    epoch: int


class Wait(NamedTuple):
    """Nothing to lease now; there may be later, when another worker is lost."""

    seconds: float
    """Ask again after this long."""


class Done(NamedTuple):
    """There is nothing more to do for this worker."""

    drained: bool
    """The job is being stopped, or this worker was given up; not every unit need be done."""


LeaseReply = Lease | Wait | Done


class UnitSummary(NamedTuple):
    """What a committed unit holds."""

    num_outputs: int
    num_failed: int
    won: bool
    """False when another attempt's file was there first; it stands, and holds the same rows."""


class WorkerReport(NamedTuple):
    """A worker's progress since its attempt began, sent about once a second."""

    counts: EngineTotals
    num_uncommitted: int
    """Outputs that are terminal in units still open."""
    num_finished: int
    """Outputs finished by decoding, committed or not."""
    num_finished_tokens: int
    """Output tokens of those."""


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


class Ended(NamedTuple):
    """A worker's process is through, or gone."""

    worker: str
    attempt: int
    error: Exception | None
