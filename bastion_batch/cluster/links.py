"""A worker's line to the coordinator and to the other workers.

Sending never blocks, so decoding never waits for it, and promises nothing: see `mail` for what a
lost message costs. What comes in is fetched between two steps.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bastion_batch.cluster.connect import NAMESPACE
from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.mail import Mail
from bastion_batch.cluster.messages import (
    Directions,
    Lease,
    LeaseReply,
    UnitSummary,
    WorkerReport,
)

GOODBYE_SECONDS = 10.0


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

    def give_back(self, lease: Lease) -> None:
        """Say that a unit needs another owner: what this one knew of it is journaled."""
        ...

    def report(self, report: WorkerReport) -> None:
        """Send progress; `directions` has the answer."""
        ...

    def directions(self) -> Directions | None:
        """The newest answer to a report that has not been fetched, if one has come."""
        ...

    def send(self, attempt: int, mail: Mail) -> None:
        """Send something to another worker, if it still lives."""
        ...

    def close(self) -> None:
        """Return when every message to the coordinator has arrived, or cannot."""
        ...


class LocalLink:
    """Calls a coordinator of the same process.

    Args:
        coordinator: of the job.
        attempt: whose line this is.
        clock: the time that the coordinator is told.
        peers: what takes in the mail of each live attempt: `Worker.deliver`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        attempt: int,
        clock: Callable[[], float] = time.monotonic,
        peers: Mapping[int, Callable[[Mail], None]] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._attempt = attempt
        self._clock = clock
        self._peers = {} if peers is None else peers
        self._reply: LeaseReply | None = None
        self._directions: Directions | None = None

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
        self._coordinator.committed(self._attempt, lease.unit, lease.epoch, summary, self._clock())

    def give_back(self, lease: Lease) -> None:
        """Say that a unit needs another owner."""
        self._coordinator.give_back(self._attempt, lease.unit, lease.epoch, self._clock())

    def report(self, report: WorkerReport) -> None:
        """Send progress; `directions` has the answer."""
        answer = self._coordinator.report(self._attempt, report, self._clock())
        before = self._directions
        self._directions = answer if before is None else before.followed_by(answer)

    def directions(self) -> Directions | None:
        """The answers to the reports since the last call, as one."""
        directions, self._directions = self._directions, None
        return directions

    def send(self, attempt: int, mail: Mail) -> None:
        """Deliver at once."""
        if attempt in self._peers:
            self._peers[attempt](mail)

    def close(self) -> None:
        """Nothing is under way."""


def actor_name(run: str, attempt: int) -> str:
    """The name by which workers of one run find each other's actor."""
    return f"{run}-{attempt}"


class RayLink:
    """Calls actors. Messages of one link to the coordinator arrive in the order they were sent.

    Args:
        coordinator: the handle of its actor.
        attempt: whose line this is.
        run: the name of the invocation, as `actor_name` takes it.
    """

    def __init__(self, coordinator: Any, attempt: int, run: str) -> None:  # noqa: ANN401 - a handle
        self._coordinator = coordinator
        self._attempt = attempt
        self._run = run
        self._lease: Any = None
        self._last: Any = None
        self._reports: deque[Any] = deque()
        self._peers: dict[int, Any] = {}

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
        self._last = self._coordinator.committed.remote(
            self._attempt, lease.unit, lease.epoch, summary
        )

    def give_back(self, lease: Lease) -> None:
        """Say that a unit needs another owner."""
        self._last = self._coordinator.give_back.remote(self._attempt, lease.unit, lease.epoch)

    def report(self, report: WorkerReport) -> None:
        """Send progress."""
        self._last = self._coordinator.report.remote(self._attempt, report)
        self._reports.append(self._last)

    def directions(self) -> Directions | None:
        """The newest answer that has come. Raises Ray's error when the coordinator is gone."""
        import ray

        newest = None
        while self._reports and ray.wait([self._reports[0]], timeout=0)[0]:
            answer = ray.get(self._reports.popleft())
            newest = answer if newest is None else newest.followed_by(answer)
        return newest

    def send(self, attempt: int, mail: Mail) -> None:
        """Send without waiting; nothing comes back of a worker that is gone."""
        import ray

        if attempt not in self._peers:
            try:
                self._peers[attempt] = ray.get_actor(actor_name(self._run, attempt), NAMESPACE)
            except ValueError:
                return
        self._peers[attempt].deliver.remote(mail)

    def close(self) -> None:
        """Return when every message to the coordinator has arrived, or cannot."""
        import ray

        if self._last is not None:
            ray.wait([self._last], timeout=GOODBYE_SECONDS)
