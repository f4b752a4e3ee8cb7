"""The driver's loop: start workers, replace the dead and the stuck, show progress, end in order.

It holds no row and decides nothing about units; a job of any size costs it the same.

    runs --+-- all units committed ------------------------------> returns
           +-- no worker left, a fault that none can mend -------> raises
           +-- signal, notice, breaker, another driver --> ends in order, for a bounded time:
               workers journal and leave, none is started -------> raises
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from bastion_batch.cluster.ledger import Held, Ledger
from bastion_batch.cluster.messages import AttemptRecord, Ended, Placed, Progress
from bastion_batch.cluster.notices import Notices
from bastion_batch.cluster.placement import Placement, Slot
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import DRAIN_SECONDS, StopSignals, interruption, notice_exit
from bastion_batch.cluster.worker import WorkerSpec
from bastion_batch.errors import BastionError, DataError, InputError, JobFailedError

if TYPE_CHECKING:
    from bastion_batch.cluster.driver_lock import Driver
    from bastion_batch.cluster.fleet import CoordinatorClient, Fleet

POLL_SECONDS = 0.2
UNPLACED_SECONDS = 60.0
GOODBYE_SECONDS = 10.0
"""How long finished workers may take to send their last counts."""
LEAVE_SECONDS = 60.0
"""How long the workers of a node that goes away may take to leave it."""

logger = logging.getLogger(__name__)


class Watches(NamedTuple):
    """What the driver listens to besides its workers."""

    signals: StopSignals
    notices: Notices
    superseded_by: Callable[[], "Driver | None"] = lambda: None
    drain_seconds: float = DRAIN_SECONDS
    """How long an orderly end may take."""
    look_seconds: float = 1.0
    """Between two looks at all there is."""
    no_progress_seconds: float = 300.0
    """After which a worker that has rows and makes no step is ended."""
    start_seconds: float = 1800.0
    """After which a worker that has not loaded its models is ended."""


class _Ending(NamedTuple):
    """The job is being ended before its last unit."""

    by: BaseException
    deadline: float


class Supervisor:
    """Runs one invocation's workers until every unit is committed."""

    def __init__(
        self,
        *,
        fleet: "Fleet",
        coordinator: "CoordinatorClient",
        placement: Placement,
        refused_nodes: frozenset[str],
        restarts: Restarts,
        make_spec: Callable[[Slot, int], WorkerSpec],
        committed: Callable[[], set[int]],
        observe: Callable[[Progress, list[AttemptRecord], list[Held]], None],
        watches: Watches,
    ) -> None:
        """`committed` lists the units whose files exist; `observe` is called every second."""
        self._fleet = fleet
        self._coordinator = coordinator
        self._placement = placement
        self._ledger = Ledger()
        self._refused = refused_nodes
        self._restarts = restarts
        self._make_spec = make_spec
        self._committed = committed
        self._observe = observe
        self._watches = watches
        self._looked_at = 0.0
        self._finished_at: float | None = None
        self._ending: _Ending | None = None
        self._going: frozenset[str] = frozenset()
        self._leaving: dict[int, float] = {}
        self._killed: set[int] = set()
        self._placed_at: dict[int, float] = {}
        self._removed_by: Exception | None = None
        self._warned: set[str] = set()

    def run(self) -> None:
        """Return when the job is finished.

        Raises:
            BastionError: no worker is left, or a fault that no worker can mend.
            KeyboardInterrupt, SystemExit: a signal or a notice came; nothing runs any more.
        """
        self._watches.signals.deferred = True
        try:
            while not self._turn():
                pass
        finally:
            self._watches.signals.deferred = False
            self._fleet.stop()

    def _turn(self) -> bool:
        """One look at everything; True when the job is finished."""
        now = time.monotonic()
        if self._finished_at is None and self._ending is None:
            self._start_due(now)
        for event in self._fleet.poll(POLL_SECONDS):
            match event:
                case Placed():
                    self._handle_place(event, now)
                case Ended():
                    self._ledger.ended(event.attempt, now)
                    self._handle_end(event)
        self._heed_signal(now)
        if now - self._looked_at >= self._watches.look_seconds or not self._fleet.alive:
            self._looked_at = now
            self._look_around(now)
        if self._ending is not None:
            return self._end(self._ending, now)
        if self._finished_at is None:
            return False
        return not self._fleet.alive or now - self._finished_at > GOODBYE_SECONDS

    # Workers

    def _start_due(self, now: float) -> None:
        for worker in self._restarts.due(now):
            slot = self._placement.slots[worker]
            avoid = self._refused | self._going
            if slot.node is not None and (
                slot.node.node_id in avoid or not self._fleet.is_live(slot.node.node_id)
            ):
                slot = self._placement.lose_home(worker)
            if slot.node is None:
                avoid |= self._placement.closed_to(slot)
            selector = {} if slot.node is not None else self._placement.selector(slot)
            if selector is not None:
                attempt = self._restarts.started(worker)
                self._fleet.start(slot, self._make_spec(slot, attempt), avoid, selector)

    def _handle_place(self, event: Placed, now: float) -> None:
        self._placed_at[event.attempt] = now
        if self._placement.slots[event.worker].node is None:
            self._follow_nodes()  # its machine may have come since the last look
        self._placement.settle(event.worker, event.node_id)
        self._ledger.placed(event.attempt, self._placement.slots[event.worker], now)
        logger.info("worker %s runs on %s, process %d", event.worker, *event.place)
        if event.node_id in self._going:
            self._send_away([event.attempt], "its machine goes away", now)

    def _follow_nodes(self) -> None:
        """Workers for machines that have come."""
        for slot in self._placement.look(self._fleet.nodes(), self._refused | self._going):
            where = slot.node.host if slot.node else "any machine"
            logger.info("worker %s joins: %s, pool %s", slot.worker, where, slot.pool.name)
            self._restarts.add(slot.worker)

    def _handle_end(self, event: Ended) -> None:
        """Give back what the worker held; whatever ended it no longer matters to a finished job."""
        self._coordinator.worker_lost(event.attempt, self._committed())
        left = self._leaving.pop(event.attempt, None) is not None
        if self._ending is not None or self._coordinator.progress().finished:
            return
        if left:
            logger.info("worker %s has left its node", event.worker)
            self._restarts.left(event.worker, time.monotonic())
        else:
            self._replace(event, event.error or JobFailedError("it ended before the job did"))

    def _replace(self, event: Ended, error: Exception) -> None:
        if isinstance(error, DataError):
            raise error
        fruitful = any(
            a.attempt == event.attempt and a.num_finished for a in self._coordinator.attempts()
        )
        removed = self._restarts.died(
            event.worker,
            time.monotonic(),
            fruitful=fruitful,
            mendable=not isinstance(error, InputError),
        )
        if removed:
            self._placement.give_up(event.worker)
            self._removed_by = error
        outcome = "given up" if removed else "its units go to another start of it or to others"
        logger.warning("worker %s ended: %s; %s", event.worker, _describe(error), outcome)
        if self._restarts.all_removed:
            self._give_up(error)

    def _give_up_hopeless(self) -> None:
        """End where all that had a machine are removed, and the others have none to wait for."""
        if self._removed_by is None or self._placement.may_go_on:
            return
        if set(self._fleet.alive) <= set(self._fleet.unplaced()):
            self._give_up(self._removed_by)

    def _give_up(self, error: Exception) -> None:
        self._look()
        if isinstance(error, InputError):
            raise error
        raise JobFailedError(
            f"no worker is left, the last one ended with: {_describe(error)}; "
            "the same command continues the job"
        ) from error

    # What happens around them

    def _look_around(self, now: float) -> None:
        """See how the job stands, and what there is to heed."""
        progress = self._look()
        if progress.finished:
            self._finished_at = self._finished_at or now
            self._fleet.kill(self._fleet.unplaced())
            return
        if self._ending is not None:
            return
        self._follow_nodes()
        self._give_up_hopeless()
        self._warn_unplaced()
        self._kill_stuck(now)
        if progress.failure is not None:
            self._begin_end(JobFailedError(f"stopped: {progress.failure}"), now)
        driver = self._watches.superseded_by()
        if driver is not None:
            self._begin_end(JobFailedError(f"another driver took over: {driver.name}"), now)
        for notice in self._watches.notices.poll():
            if notice.nodes is not None:
                self._leave(notice.nodes, notice.reason, now)
            elif self._ending is None:
                self._watches.signals.say(f"stopping: {notice.reason}")
                self._begin_end(notice_exit(), now)

    def _look(self) -> Progress:
        progress = self._coordinator.progress()
        held = self._ledger.held(time.monotonic())
        self._observe(progress, self._coordinator.attempts(), held)
        return progress

    def _leave(self, nodes: frozenset[str], reason: str, now: float) -> None:
        """Have the workers of these nodes hand over their rows and end, and start none there."""
        node_ids = self._fleet.node_ids(nodes)
        self._going |= node_ids
        self._send_away(self._fleet.on_nodes(node_ids), reason, now)

    def _send_away(self, attempts: Collection[int], reason: str, now: float) -> None:
        """Have these end for the sake of their machine. One that still loads holds nothing."""
        loaded = {record.attempt for record in self._coordinator.attempts()}
        for attempt in attempts:
            if attempt not in self._leaving:
                logger.warning("%s: attempt %d leaves it", reason, attempt)
                self._leaving[attempt] = now + LEAVE_SECONDS
                if attempt in loaded:
                    self._coordinator.dismiss(attempt)
                else:
                    self._killed.add(attempt)
                    self._fleet.kill([attempt])

    def _kill_stuck(self, now: float) -> None:
        """End what makes no progress, does not start, or did not leave its node in time."""
        late = {attempt for attempt, until in self._leaving.items() if until < now}
        late.update(self._coordinator.stuck(self._watches.no_progress_seconds))
        late.update(self._not_loaded_since(now - self._watches.start_seconds))
        for attempt in late.intersection(self._fleet.alive) - self._killed:
            logger.warning("attempt %d makes no progress or does not leave: ending it", attempt)
            self._killed.add(attempt)
            self._fleet.kill([attempt])

    def _not_loaded_since(self, latest: float) -> list[int]:
        """Attempts whose processes are there since before this time, and have no engine yet."""
        slow = [attempt for attempt, at in self._placed_at.items() if at < latest]
        if slow:
            for record in self._coordinator.attempts():
                self._placed_at.pop(record.attempt, None)
        return [attempt for attempt in slow if attempt in self._placed_at]

    def _warn_unplaced(self) -> None:
        waiting = set(self._fleet.unplaced(UNPLACED_SECONDS).values()) - self._warned
        self._warned |= waiting
        for worker in sorted(waiting):
            slot = self._placement.slots[worker]
            logger.warning(
                "worker %s of %s has had no place for %.0f s; it needs a CPU%s%s. There are: %s. "
                "The other workers go on",
                worker,
                slot.pool.describe(),
                UNPLACED_SECONDS,
                " and a GPU" if slot.device == "cuda" else "",
                f" on {slot.node.host}" if slot.node else "",
                self._fleet.resources(),
            )

    # The end before the last unit

    def _heed_signal(self, now: float) -> None:
        signum = self._watches.signals.received
        if signum is not None and self._ending is None:
            self._begin_end(interruption(signum), now)

    def _begin_end(self, by: BaseException, now: float) -> None:
        """Have every worker journal and end. One that holds nothing yet is not waited for."""
        if self._ending is not None:
            return
        logger.info("ending: %r", by)
        self._ending = _Ending(by, now + self._watches.drain_seconds)
        self._coordinator.drain()
        self._fleet.tell_to_end(self._fleet.alive)
        loaded = {record.attempt for record in self._coordinator.attempts()}
        self._fleet.kill(set(self._fleet.alive) - loaded)

    def _end(self, ending: _Ending, now: float) -> bool:
        if self._fleet.alive and now < ending.deadline:
            return False
        if self._fleet.alive:
            logger.warning(
                "%d workers did not end in time: what they had in hand is decoded again",
                len(self._fleet.alive),
            )
        if self._look().finished:
            return True
        raise ending.by


def _describe(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, BastionError) else f"{type(error).__name__}: {text}"
