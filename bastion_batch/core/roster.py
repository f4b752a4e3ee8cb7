"""What the balance knows of each worker, brought up to date by its reports, and sums over all."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bastion_batch.core.orders import RowMove, Share, Status, WorkerView
from bastion_batch.core.rates import Fit, RateCurve, RateFit
from bastion_batch.records import RowKey

ARRIVAL_SECONDS = 6.0
"""A running row that was sent to a worker and is not seen there after this long went astray."""
SHARE_SECONDS = 2.5
"""Waiting rows that were promised to a worker are among those it reports after this long."""
PACE_RATE = 0.2
"""Share of a new interval between reports in what is taken for usual."""
SICK_PACES = 20.0
"""A worker silent for less than so many times its usual interval is not sick."""

NO_STATUS = Status()
ALIKE = RateCurve(saturated=1.0, half=1.0, prefill=1.0)
"""Stands for every worker before one is known."""


class _Counted(NamedTuple):
    """What a worker adds to the sums."""

    waiting_rows: int = 0
    waiting_tokens: float = 0.0
    full_rate: float = 0.0
    is_known: int = 0
    is_staying: int = 0

    def plus(self, other: "_Counted", sign: int = 1) -> "_Counted":
        return _Counted._make(a + sign * b for a, b in zip(self, other, strict=True))


_UNCOUNTED = _Counted()


@dataclass(slots=True, eq=False)
class WorkerState:
    """One live worker."""

    number: int
    kind: str
    max_batch: int
    rate_fit: RateFit
    reported_at: float
    progressed_at: float
    """When its step count last rose, or it had nothing to decode."""
    status: Status = NO_STATUS
    units: set[int] = field(default_factory=set)
    is_leaving: bool = False
    leased_rows: int = 0
    """Of units leased since the last report, which does not show them yet."""
    leased_tokens: float = 0.0
    coming: dict[RowKey, float] = field(default_factory=dict)
    """Running rows on their way here, and since when."""
    promised: list[tuple[float, int]] = field(default_factory=list)
    """Waiting rows on their way here: since when, how many."""
    moves: list[RowMove] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    """To be told at its next report."""
    pace_seconds: float = 1.0
    """Usual time between its reports."""
    model_rows: float = -1.0
    """Rows behind the model that it has."""
    counted: _Counted = _UNCOUNTED

    @property
    def fit(self) -> Fit | None:
        """How fast it is, and how that is known."""
        return self.rate_fit.fit

    @property
    def curve(self) -> RateCurve | None:
        """How fast it is, as far as known."""
        return None if self.fit is None else self.fit.curve

    @property
    def full_rate(self) -> float | None:
        """Tokens per second with every slot taken, or None if not known."""
        return None if self.curve is None else self.curve.total(self.max_batch)

    @property
    def num_running(self) -> int:
        """Rows in its engine or queued there, and those on their way."""
        num_promised = sum(num_rows for _, num_rows in self.promised)
        return len(self.status.running) + len(self.coming) + num_promised

    @property
    def waiting_rows(self) -> int:
        """Rows of its own units that wait."""
        return self.status.backlog.num_rows + self.leased_rows

    @property
    def waiting_tokens(self) -> float:
        """Expected tokens of those."""
        return self.status.backlog.num_tokens + self.leased_tokens

    @property
    def view(self) -> WorkerView:
        """For people."""
        batch = min(len(self.status.running), self.max_batch)
        return WorkerView(self.fit, None if self.curve is None else self.curve.total(batch))

    def take_in(self, status: Status, prior: RateCurve | None, now: float) -> None:
        """A report has come."""
        if not status.running or status.num_steps > self.status.num_steps:
            self.progressed_at = now
        interval = max(now - self.reported_at, 0.0)
        self.pace_seconds += PACE_RATE * (interval - self.pace_seconds)
        self.reported_at = now
        self.status = status
        self.leased_rows, self.leased_tokens = 0, 0.0
        if status.sample is not None:
            self.rate_fit.add(status.sample, prior)
        if self.coming:
            here = {row.key for row in status.running}
            self.coming = {
                key: since
                for key, since in self.coming.items()
                if key not in here and now - since < ARRIVAL_SECONDS
            }
        if self.promised:
            self.promised = [p for p in self.promised if now - p[0] < SHARE_SECONDS]

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether nothing was heard of it, or of progress, for far longer than usual."""
        silence = now - min(self.reported_at, self.progressed_at)
        return silence > max(seconds, SICK_PACES * self.pace_seconds)


class Roster:
    """The live workers. Whatever changes a state calls `recount`, which is cheap."""

    def __init__(self) -> None:
        self._states: dict[int, WorkerState] = {}
        self._sums = _Counted()
        self._priors: dict[str, RateCurve] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def get(self, worker: int) -> WorkerState | None:
        """The state of a worker, or None if it is not live."""
        return self._states.get(worker)

    def add(self, state: WorkerState) -> None:
        """A worker has come."""
        self._states[state.number] = state
        self.recount(state)

    def remove(self, worker: int) -> WorkerState | None:
        """A worker has gone; its last state, or None if it was not live."""
        state = self._states.pop(worker, None)
        if state is not None:
            self._sums = self._sums.plus(state.counted, -1)
        return state

    def recount(self, state: WorkerState) -> None:
        """Bring the sums up to date with a state."""
        fit, rate = state.fit, state.full_rate
        is_known = rate is not None and not state.is_leaving
        counted = _Counted(
            state.waiting_rows,
            state.waiting_tokens,
            rate if rate is not None and is_known else 0.0,
            int(is_known),
            int(not state.is_leaving),
        )
        self._sums = self._sums.plus(state.counted, -1).plus(counted)
        state.counted = counted
        if fit is not None and fit.half_from == "measured":
            self._priors[state.kind] = fit.curve

    def prior(self, kind: str) -> RateCurve | None:
        """The latest measured curve of a worker of a kind."""
        return self._priors.get(kind)

    def assumed_curve(self, state: WorkerState) -> RateCurve:
        """A worker's curve; while it is unknown, one of its kind's, or the slowest known one."""
        curve = state.curve or self._priors.get(state.kind)
        if curve is None:
            known = (other.curve for other in self if other.curve is not None)
            curve = min(known, key=lambda c: c.saturated, default=ALIKE)
        return curve

    @property
    def waiting_rows(self) -> int:
        """Rows that wait in open units."""
        return self._sums.waiting_rows

    @property
    def waiting_tokens(self) -> float:
        """Expected tokens of those."""
        return max(self._sums.waiting_tokens, 0.0)

    @property
    def full_rate(self) -> float | None:
        """Tokens per second of all that stay, every slot taken; the mean stands for the unknown."""
        if not self._sums.is_known:
            return None
        return self._sums.full_rate / self._sums.is_known * self._sums.is_staying

    @property
    def mean_rate(self) -> float | None:
        """Of a worker with every slot taken, or None before any is known."""
        return self._sums.full_rate / self._sums.is_known if self._sums.is_known else None
