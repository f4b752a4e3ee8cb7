"""What workers, coordinator and driver tell each other: small, immutable, without heavy imports.

The coordinator's process imports neither torch nor pyarrow, so the engine's totals cross the
cluster as `EngineCounts`, whose fields carry the same names.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class EngineCounts(NamedTuple):
    """What one engine has done since it started. Counts add field by field."""

    num_steps: int = 0
    num_row_steps: int = 0
    """Decode steps summed over the rows that were live in them."""
    num_committed: int = 0
    """Tokens, those that end a prefill and those of plain bursts included."""
    num_decoded: int = 0
    """Tokens committed in decode steps."""
    num_accepted: int = 0
    num_nodes: int = 0
    """Drafted nodes verified, roots not counted."""
    num_prefill_tokens: int = 0
    step_seconds: float = 0.0
    plain_steps: int = 0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    """What plain decoding takes for `plain_tokens`, by the measured bursts of plain steps."""
    paired_tokens: int = 0
    paired_seconds: float = 0.0
    """What the drafted steps next to those bursts took for `paired_tokens`."""

    @classmethod
    def of(cls, totals: Mapping[str, float]) -> "EngineCounts":
        """The counts among an engine's totals, given as a mapping."""
        return cls(**{name: totals[name] for name in cls._fields})  # type: ignore[arg-type]

    def plus(self, other: "EngineCounts") -> "EngineCounts":
        """The fieldwise sum."""
        return EngineCounts._make(a + b for a, b in zip(self, other, strict=True))

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed per decode step of a row."""
        return self.num_decoded / self.num_row_steps if self.num_row_steps else None

    @property
    def mean_nodes(self) -> float | None:
        """Drafted nodes per decode step of a row."""
        return self.num_nodes / self.num_row_steps if self.num_row_steps else None


def measured_speedup(engines: Iterable[EngineCounts]) -> float | None:
    """How much faster the drafted steps were than plain decoding of the same rows.

    Plain decoding's time for the paired tokens over the time they took, summed over the engines
    that measured both: devices of unequal speed weigh by their own plain rate.
    """
    plain_seconds = drafted_seconds = 0.0
    for counts in engines:
        if counts.plain_tokens and counts.paired_tokens:
            plain_seconds += counts.paired_tokens * counts.plain_seconds / counts.plain_tokens
            drafted_seconds += counts.paired_seconds
    return plain_seconds / drafted_seconds if drafted_seconds else None


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

    counts: EngineCounts
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
    counts: EngineCounts
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
