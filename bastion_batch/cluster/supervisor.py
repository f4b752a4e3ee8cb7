"""The driver's loop: start workers, replace the dead, show progress, stop when told.

It holds no row and decides nothing about units; a job of any size costs it the same.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bastion_batch.cluster.messages import AttemptRecord, Ended, Placed, Progress
from bastion_batch.cluster.placement import Slot
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import StopSignals, interruption
from bastion_batch.cluster.worker import WorkerSpec
from bastion_batch.errors import BastionError, DataError, InputError, JobFailedError

if TYPE_CHECKING:
    from bastion_batch.cluster.fleet import CoordinatorClient, Fleet

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
UNPLACED_SECONDS = 60.0
GOODBYE_SECONDS = 10.0
"""How long finished workers may take to send their last counts."""

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs one invocation's workers until every unit is committed."""

    def __init__(
        self,
        *,
        fleet: "Fleet",
        coordinator: "CoordinatorClient",
        slots: Mapping[str, Slot],
        restarts: Restarts,
        make_spec: Callable[[Slot, int], WorkerSpec],
        committed: Callable[[], set[int]],
        observe: Callable[[Progress, list[AttemptRecord]], None],
        signals: StopSignals,
    ) -> None:
        """`committed` lists the units whose files exist; `observe` is called every second."""
        self._fleet = fleet
        self._coordinator = coordinator
        self._slots = slots
        self._restarts = restarts
        self._make_spec = make_spec
        self._committed = committed
        self._observe = observe
        self._signals = signals
        self._looked_at = 0.0
        self._finished_at: float | None = None
        self._warned: set[str] = set()
        self._last_error: Exception | None = None

    def run(self) -> None:
        """Return when the job is finished.

        Raises:
            BastionError: no worker is left, or a fault that no worker can mend.
            KeyboardInterrupt, SystemExit: a signal came; nothing runs any more.
        """
        self._signals.deferred = True
        try:
            while not self._turn():
                pass
        finally:
            self._signals.deferred = False
            self._fleet.stop()

    def _turn(self) -> bool:
        """One look at everything; True when the job is finished."""
        now = time.monotonic()
        if self._finished_at is None:
            self._start_due(now)
        for event in self._fleet.poll(POLL_SECONDS):
            match event:
                case Placed():
                    logger.info("worker %s runs on %s, process %d", event.worker, *event.place)
                case Ended():
                    self._handle_end(event)
        if self._signals.received is not None:
            self._coordinator.drain()
            self._look()
            raise interruption(self._signals.received)
        if now - self._looked_at >= LOOK_SECONDS or not self._fleet.num_alive:
            self._looked_at = now
            self._warn_unplaced()
            if self._look().finished and self._finished_at is None:
                self._finished_at = now
        if self._finished_at is None:
            return False
        return not self._fleet.num_alive or now - self._finished_at > GOODBYE_SECONDS

    def _start_due(self, now: float) -> None:
        for worker in self._restarts.due(now):
            attempt = self._restarts.started(worker)
            self._fleet.start(self._slots[worker], self._make_spec(self._slots[worker], attempt))

    def _handle_end(self, event: Ended) -> None:
        """Give back what the worker held; whatever ended it no longer matters to a finished job."""
        self._coordinator.worker_lost(event.attempt, self._committed())
        if not self._coordinator.progress().finished:
            self._replace(event, event.error or JobFailedError("it ended before the job did"))

    def _replace(self, event: Ended, error: Exception) -> None:
        if isinstance(error, DataError):
            raise error
        self._last_error = error
        fruitful = any(
            a.attempt == event.attempt and a.num_units for a in self._coordinator.attempts()
        )
        removed = self._restarts.died(
            event.worker,
            time.monotonic(),
            fruitful=fruitful,
            mendable=not isinstance(error, InputError),
        )
        outcome = "given up" if removed else "its units go to another start of it or to others"
        logger.warning("worker %s ended: %s; %s", event.worker, _describe(error), outcome)
        if self._restarts.all_removed:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._look()
        if isinstance(error, InputError):
            raise error
        raise JobFailedError(
            f"no worker is left, the last one ended with: {_describe(error)}; "
            "the same command continues the job"
        ) from error

    def _look(self) -> Progress:
        progress = self._coordinator.progress()
        self._observe(progress, self._coordinator.attempts())
        return progress

    def _warn_unplaced(self) -> None:
        for worker in set(self._fleet.unplaced(UNPLACED_SECONDS)) - self._warned:
            self._warned.add(worker)
            slot = self._slots[worker]
            logger.warning(
                "worker %s has had no place for %.0f s (it needs a CPU%s%s); the others work on",
                worker,
                UNPLACED_SECONDS,
                " and a GPU" if slot.device == "cuda" else "",
                f", on {slot.node.host}" if slot.node else "",
            )


def _describe(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, BastionError) else f"{type(error).__name__}: {text}"
