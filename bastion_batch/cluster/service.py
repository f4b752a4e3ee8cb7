"""The coordinator as an actor, which has a clock, and the driver's way to call it."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.messages import (
    AttemptRecord,
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

    def report(self, attempt: int, report: WorkerReport) -> None:
        """See `Coordinator.report`."""
        self._coordinator.report(attempt, report, time.monotonic())

    def worker_lost(self, attempt: int, committed: Collection[int]) -> None:
        """See `Coordinator.worker_lost`."""
        self._coordinator.worker_lost(attempt, committed, time.monotonic())

    def drain(self) -> None:
        """See `Coordinator.drain`."""
        self._coordinator.drain()

    def attempts(self) -> list[AttemptRecord]:
        """See `Coordinator.attempts`."""
        return self._coordinator.attempts()

    def progress(self) -> Progress:
        """See `Coordinator.progress`."""
        return self._coordinator.progress(time.monotonic())
