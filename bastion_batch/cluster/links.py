"""A worker's line to the coordinator. Sending never blocks, so decoding never waits for it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.messages import Lease, LeaseReply, UnitSummary, WorkerReport


class Link(Protocol):
    """One attempt's messages. At most one lease is asked for at a time."""

    def register(self, worker: str, info: Mapping[str, Any]) -> None:
        """Say that the engine is loaded."""
        ...

    def ask(self) -> None:
        """Ask for a lease; `answer` has the reply."""
        ...

    def answer(self, timeout_seconds: float) -> LeaseReply | None:
        """The reply to `ask`, or None if it has not come within this time."""
        ...

    def committed(self, lease: Lease, summary: UnitSummary) -> None:
        """Say that the unit's file exists."""
        ...

    def report(self, report: WorkerReport) -> None:
        """Send progress."""
        ...

    def close(self) -> None:
        """Return when every message has arrived."""
        ...


class LocalLink:
    """Calls a coordinator of the same process."""

    def __init__(
        self,
        coordinator: Coordinator,
        attempt: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._attempt = attempt
        self._clock = clock
        self._reply: LeaseReply | None = None

    def register(self, worker: str, info: Mapping[str, Any]) -> None:
        """Say that the engine is loaded."""
        self._coordinator.register(worker, self._attempt, info, self._clock())

    def ask(self) -> None:
        """Lease at once; `answer` has the reply."""
        self._reply = self._coordinator.lease(self._attempt, self._clock())

    def answer(self, timeout_seconds: float) -> LeaseReply | None:
        """The reply to the last `ask`."""
        return self._reply

    def committed(self, lease: Lease, summary: UnitSummary) -> None:
        """Say that the unit's file exists."""
        self._coordinator.committed(self._attempt, *lease, summary, self._clock())

    def report(self, report: WorkerReport) -> None:
        """Send progress."""
        self._coordinator.report(self._attempt, report, self._clock())

    def close(self) -> None:
        """Nothing is under way."""


class RayLink:
    """Calls a coordinator actor. Messages of one link arrive in the order they were sent."""

    def __init__(self, coordinator: Any, attempt: int) -> None:  # noqa: ANN401 - an actor handle
        self._coordinator = coordinator
        self._attempt = attempt
        self._lease: Any = None
        self._last: Any = None

    def register(self, worker: str, info: Mapping[str, Any]) -> None:
        """Say that the engine is loaded."""
        self._last = self._coordinator.register.remote(worker, self._attempt, info)

    def ask(self) -> None:
        """Send the request for a lease."""
        self._lease = self._coordinator.lease.remote(self._attempt)

    def answer(self, timeout_seconds: float) -> LeaseReply | None:
        """The reply, if it comes in time. Raises Ray's error when the coordinator is gone."""
        import ray

        ready, _ = ray.wait([self._lease], timeout=timeout_seconds)
        return ray.get(ready[0]) if ready else None

    def committed(self, lease: Lease, summary: UnitSummary) -> None:
        """Say that the unit's file exists."""
        self._last = self._coordinator.committed.remote(self._attempt, *lease, summary)

    def report(self, report: WorkerReport) -> None:
        """Send progress."""
        self._last = self._coordinator.report.remote(self._attempt, report)

    def close(self) -> None:
        """Return when every message has arrived."""
        import ray

        if self._last is not None:
            ray.get(self._last)
