"""One run of the job command that has units to decode: from its first worker to its last.

It brings up the coordinator and the workers, keeps the records of the run, and tells people.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from bastion_batch.cluster.connect import connected
from bastion_batch.cluster.driver_lock import DriverLock
from bastion_batch.cluster.dtype import settle_dtype
from bastion_batch.cluster.engines import EngineSource
from bastion_batch.cluster.ledger import Held, total_cost
from bastion_batch.cluster.messages import AttemptRecord, Progress
from bastion_batch.cluster.notices import Notices, StopFile, notice_sources
from bastion_batch.cluster.placement import Placement, Slot
from bastion_batch.cluster.pools import Node, Pool, pools_of
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import HANG_SECONDS, StopSignals, drain_seconds
from bastion_batch.cluster.supervisor import Supervisor, Watches
from bastion_batch.cluster.worker import WorkerSpec
from bastion_batch.cluster.worker_states import worker_states
from bastion_batch.config import JobConfig
from bastion_batch.core.balance import Balance
from bastion_batch.errors import BastionError, InputError
from bastion_batch.io.commit import committed_units
from bastion_batch.io.plan import Plan
from bastion_batch.io.retry import Retry
from bastion_batch.io.store import Store
from bastion_batch.progress import Display, ProgressFile
from bastion_batch.run_record import RunRecord
from bastion_batch.versions import installed_versions

RECORD_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Driver(NamedTuple):
    """What an invocation works with."""

    display: Display
    signals: StopSignals
    lock: DriverLock
    engines: EngineSource
    before_data: Callable[[], None] | None
    retry: Retry | None
    balance: Callable[..., Balance]


class Invocation:
    """One run of the job command that has units to decode."""

    def __init__(
        self, job: JobConfig, plan: Plan, store: Store, number: int, driver: Driver
    ) -> None:
        self._started = time.monotonic()
        self._job = job
        self._plan = plan
        self._store = store
        self._number = number
        self._name = f"bastion-batch-{plan.job_id}-{number}"
        self._driver = driver
        self._versions = installed_versions()
        self._record = RunRecord(job, plan.job_id)
        self._record.begin(number, datetime.now(UTC).isoformat(timespec="seconds"))
        self._progress_file = ProgressFile(store)
        self._last: tuple[Progress, list[AttemptRecord], list[Held]] | None = None
        self._recorded_at = 0.0
        self._told_of_storage = False
        self._mismatched: set[int] = set()

    def decode(self) -> None:
        """Decode and commit every unit that is not yet committed."""
        self._save("running")
        status = "failed"
        patience = drain_seconds(os.environ) + HANG_SECONDS
        interrupted = partial(self._save, "interrupted")
        try:
            with (
                self._driver.signals.end_within(patience, interrupted),
                connected(self._num_cpus(), self._name) as own_ray,
            ):
                self._driver.signals.rearm()
                self._supervise(own_ray)
            status = "finished"
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except BastionError as error:
            logger.info("invocation %d ends: %s", self._number, error)
            raise
        finally:
            self._save(status)

    def _num_cpus(self) -> int:
        """CPUs of a Ray of our own: the machine's, and enough for the workers asked for."""
        counts = [1 if p.count == "auto" else p.count for p in self._job.workers.all_pools()]
        return max(os.cpu_count() or 1, sum(counts))

    def _supervise(self, own_ray: bool) -> None:
        # Ray is imported by these, and only now: its environment is set.
        from bastion_batch.cluster.environment import Nodes, usable_nodes
        from bastion_batch.cluster.fleet import CoordinatorClient, Fleet, can_grow, cluster_nodes

        found = [node for node in cluster_nodes() if node.num_cpus]
        is_same = own_ray or not found  # a Ray of our own is this machine and this Python
        nodes = Nodes(found, {}) if is_same else usable_nodes(found, self._store)
        placement = self._placement(nodes.usable, may_grow=not own_ray and can_grow())
        done = self._committed()
        units: dict[str, Any] = {
            **coordinator_units(self._plan, self._driver.retry)._asdict(),
            "done": done,
            "faults_expected": self._driver.retry is not None,
            "balance": self._driver.balance,
        }
        coordinator = CoordinatorClient(self._name, units, self._store, self._number)
        self._driver.display.say(
            f"{self._plan.num_units - len(done)} of {self._plan.num_units} units to decode, "
            f"{_described(placement.slots.values())}"
        )
        Supervisor(
            fleet=Fleet(self._name, coordinator, self._driver.engines),
            coordinator=coordinator,
            placement=placement,
            refused_nodes=frozenset(nodes.refused),
            restarts=Restarts(placement.slots, self._number),
            make_spec=self._spec,
            committed=self._committed,
            observe=self._observe,
            watches=self._watches(),
        ).run()

    def _placement(self, nodes: Sequence[Node], *, may_grow: bool) -> Placement:
        """The workers' places now. Pools without any are told of; others may join them later.

        Raises:
            InputError: no worker has a place, and none can be expected.
        """
        placement = Placement(pools_of(self._job.workers), may_grow=may_grow)
        placement.look(nodes)
        missing = require_places(placement, nodes, may_grow=may_grow)
        if missing:
            self._driver.display.say(f"waiting for machines: {missing}")
        if any(slot.device == "cuda" for slot in placement.slots.values()):
            settle_dtype(self._job, self._store, lambda: "bfloat16")
        return placement

    def _watches(self) -> Watches:
        StopFile(self._store).clear()
        return Watches(
            signals=self._driver.signals,
            notices=Notices(notice_sources(self._store)),
            superseded_by=lambda: self._driver.lock.superseded_by,
            drain_seconds=drain_seconds(os.environ),
            no_progress_seconds=self._job.limits.no_progress_seconds,
            start_seconds=self._job.limits.start_seconds,
        )

    def _spec(self, slot: Slot, attempt: int) -> WorkerSpec:
        return WorkerSpec(
            worker=slot.worker,
            attempt=attempt,
            job=self._job.with_pool(slot.pool.config),
            pool=slot.pool,
            job_id=self._plan.job_id,
            inputs=self._plan.inputs,
            steps=self._plan.steps,
            device=slot.device,
            workers_on_node=slot.workers_on_node,
            versions=self._versions,
            before_data=self._driver.before_data,
            retry=self._driver.retry,
        )

    def _observe(self, progress: Progress, attempts: list[AttemptRecord], held: list[Held]) -> None:
        is_news = self._last is None or len(attempts) != len(self._last[1])
        progress = progress._replace(cost=total_cost(held))
        self._last = progress, attempts, held
        self._warn_of_mismatches(attempts)
        self._driver.display.show(progress)
        self._try(partial(self._progress_file.write, progress, worker_states(attempts, held)))
        if is_news or time.monotonic() - self._recorded_at >= RECORD_SECONDS:
            self._recorded_at = time.monotonic()
            self._save("running")

    def _warn_of_mismatches(self, attempts: list[AttemptRecord]) -> None:
        """Say once for each worker that its device is not what its pool selects."""
        for attempt in attempts:
            mismatch = attempt.info.get("mismatch")
            if mismatch and attempt.attempt not in self._mismatched:
                self._mismatched.add(attempt.attempt)
                logger.warning("worker %s: %s; what it measures counts", attempt.worker, mismatch)

    def _save(self, status: str) -> None:
        progress, attempts, held = self._last or (None, [], [])
        self._record.note(
            status,
            attempts,
            held,
            wall_seconds=time.monotonic() - self._started,
            decoding_seconds=progress.elapsed_seconds if progress else 0.0,
        )
        self._try(self._record.save)

    def _try(self, write: Callable[[], None]) -> None:
        """Write what only informs: storage that fails now is no reason to stop decoding."""
        try:
            write()
        except OSError as error:
            if not self._told_of_storage:
                logger.warning("output %s: progress cannot be written: %s", self._store.root, error)
            self._told_of_storage = True

    def _committed(self) -> set[int]:
        """The units that need nothing any more."""
        look = partial(committed_units, self._store)
        if self._driver.retry is not None:
            look = partial(self._driver.retry.done, self._store, self._plan)
        return self._store.retries.call(look, what="listing data/")


def _described(slots: Collection[Slot]) -> str:
    """How many workers of each pool and device."""
    counts = Counter((slot.pool.name, slot.device) for slot in slots)
    several = len({pool for pool, _ in counts}) > 1
    parts = [f"{n} x {device}{f' ({pool})' * several}" for (pool, device), n in counts.items()]
    return ", ".join(parts) or "no worker yet"


def require_places(placement: Placement, nodes: Sequence[Node], *, may_grow: bool) -> str:
    """What workers wait for, or nothing if all pools have machines.

    Raises:
        InputError: no worker has a place, and none can be expected; or of a pool that waits for
            machines nobody says what device it is to use.
    """
    undecided = ", ".join(pool.describe() for pool in placement.undecided())
    if undecided and may_grow:
        raise InputError(f"no machine tells the device of {undecided}; say `device`")
    missing = _missing(placement.without_place(), nodes)
    if not placement.has_home and not may_grow:
        raise InputError(f"no worker has a place; {missing}")
    return missing


def _missing(pools: Sequence[Pool], nodes: Sequence[Node]) -> str:
    """Pools that no machine is there for, and the machines that are."""
    if not pools:
        return ""
    selected = "; ".join(pool.describe() for pool in pools)
    return f"no machine now for {selected}. There are: {', '.join(map(str, nodes)) or 'none'}"


class CoordinatorUnits(NamedTuple):
    """What the coordinator knows of a plan's units."""

    spans: list[int]
    num_outputs: list[int]


def coordinator_units(plan: Plan, retry: Retry | None = None) -> CoordinatorUnits:
    """Number the spans through all files, and count the outputs of each unit.

    Of a unit whose failed rows are decoded again, only those count.
    """
    spans: list[int] = []
    previous = None
    for key in zip(plan.units["file"].to_pylist(), plan.units["span"].to_pylist(), strict=True):
        spans.append(spans[-1] + (key != previous) if spans else 0)
        previous = key
    outputs = [n * plan.samples_per_row for n in plan.units["num_rows"].to_pylist()]
    if retry is not None:
        for unit, chosen in retry.units.items():
            outputs[unit] = chosen.num_outputs
    return CoordinatorUnits(spans, outputs)
