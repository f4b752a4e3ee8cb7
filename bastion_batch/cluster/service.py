"""The coordinator as an actor, which has a clock, and the driver's way to call it."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.messages import (
    AttemptRecord,
    Directions,
    LeaseReply,
    Progress,
    UnitSummary,
    WorkerReport,
)


class CoordinatorService:
    """Tells a `Coordinator` the time of every call."""

    def __init__(self, **units: Any) -> None:  # noqa: ANN401 - as Coordinator
        self._coordinator = Coordinator(**units)

    def register(self, worker: str, attempt: int, info: Mapping[str, Any]) -> None:
        """See `Coordinator.register`."""
        self._coordinator.register(worker, attempt, info, time.monotonic())

    def lease(self, attempt: int) -> LeaseReply:
        """See `Coordinator.lease`."""
        return self._coordinator.lease(attempt, time.monotonic())

    def committed(self, attempt: int, unit: int, epoch: int, summary: UnitSummary) -> None:
        """See `Coordinator.committed`."""
        self._coordinator.committed(attempt, unit, epoch, summary, time.monotonic())

    def give_back(self, attempt: int, unit: int, epoch: int) -> None:
        """See `Coordinator.give_back`."""
        self._coordinator.give_back(attempt, unit, epoch, time.monotonic())

    def report(self, attempt: int, report: WorkerReport) -> Directions:
        """See `Coordinator.report`."""
        return self._coordinator.report(attempt, report, time.monotonic())

    def worker_lost(self, attempt: int, committed: Collection[int]) -> None:
        """See `Coordinator.worker_lost`."""
        self._coordinator.worker_lost(attempt, committed, time.monotonic())

    def drain(self) -> None:
        """See `Coordinator.drain`."""
        self._coordinator.drain()

    def dismiss(self, attempt: int) -> None:
        """See `Coordinator.dismiss`."""
        self._coordinator.dismiss(attempt)

    def stuck(self, no_progress_seconds: float) -> list[int]:
        """See `Coordinator.stuck`."""
        return self._coordinator.stuck(time.monotonic(), no_progress_seconds)

    def attempts(self) -> list[AttemptRecord]:
        """See `Coordinator.attempts`."""
        return self._coordinator.attempts()

    def progress(self) -> Progress:
        """See `Coordinator.progress`."""
        return self._coordinator.progress(time.monotonic())
