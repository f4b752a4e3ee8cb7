"""The actors of one invocation: the coordinator and the workers' incarnations.

Imported only once a Ray is connected: its settings come from the environment. No actor is
detached, so that none outlives the driver; none is restarted by Ray, whose restarts would reuse
an attempt number. Every process that is started for a run carries the run's name in its
environment, so that what is left of a run can be found on any machine.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bastion_batch.cluster.connect import NAMESPACE, RUN_VARIABLE
from bastion_batch.cluster.engines import EngineSource
from bastion_batch.cluster.links import RayLink, actor_name
from bastion_batch.cluster.logs import log_to_file
from bastion_batch.cluster.messages import (
    AttemptRecord,
    Directions,
    Ended,
    Place,
    Placed,
    Progress,
)
from bastion_batch.cluster.placement import Slot
from bastion_batch.cluster.pools import NODE_ID_LABEL, Node
from bastion_batch.cluster.service import CoordinatorService
from bastion_batch.cluster.worker import Worker, WorkerSpec
from bastion_batch.errors import JobFailedError
from bastion_batch.io.store import Store

CALL_SECONDS = 60.0
KILL_SECONDS = 1.0
"""How long the end of a run may take over processes that do not end by themselves."""
CALLS_AT_ONCE = 4
"""A worker takes in mail while it decodes."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incarnation:
    worker: str
    attempt: int
    actor: Any
    started_at: float
    placing: Any
    """Reference to its place; None once it is known."""
    running: Any
    place: Place | None = None
    node_id: str | None = None


def cluster_nodes() -> list[Node]:
    """The live nodes of the connected Ray."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
            int(node["Resources"].get("GPU", 0)),
            node["Labels"],
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_resources() -> str:
    """What the nodes have, and what of it nobody uses now, for messages."""
    nodes = ", ".join(map(str, cluster_nodes()))
    free = ray.available_resources()
    return f"{nodes}; free now: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"


def can_grow() -> bool:
    """Whether an autoscaler adds nodes when they are asked for. Ray has no public name for it."""
    try:
        from ray._private.state import state
    except ImportError:
        return False
    find = getattr(state, "get_cluster_config", None)
    config = None if find is None else find()
    return config is not None and any(group.max_count for group in config.node_group_configs)


class CoordinatorClient:
    """The driver's calls to the coordinator actor, which lives on the driver's node."""

    def __init__(self, run: str, units: dict[str, Any], store: Store, invocation: int) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = (
            ray.remote(num_cpus=0, max_restarts=0)(CoordinatorService)
            .options(
                name=f"{run}-coordinator",
                namespace=NAMESPACE,
                scheduling_strategy=here,
                runtime_env=_runtime_env(run),
            )
            .remote(**units)
        )
        actor.__ray_call__.remote(_begin_log, store, f"coordinator-{invocation}")
        self.actor = actor

    def progress(self) -> Progress:
        """Where the job stands."""
        return self._get(self.actor.progress.remote())

    def attempts(self) -> list[AttemptRecord]:
        """Every incarnation so far."""
        return self._get(self.actor.attempts.remote())

    def worker_lost(self, attempt: int, committed: Collection[int]) -> None:
        """Give an incarnation up."""
        self._get(self.actor.worker_lost.remote(attempt, committed))

    def drain(self) -> None:
        """Lease nothing more; every worker is told to end."""
        self._get(self.actor.drain.remote())

    def dismiss(self, attempt: int) -> None:
        """Have one worker end in order."""
        self._get(self.actor.dismiss.remote(attempt))

    def stuck(self, no_progress_seconds: float) -> list[int]:
        """Attempts that have rows and have made no step for longer than this."""
        return self._get(self.actor.stuck.remote(no_progress_seconds))

    def _get(self, reference: Any) -> Any:  # noqa: ANN401 - whatever the call returns
        try:
            return ray.get(reference, timeout=CALL_SECONDS)
        except RayTaskError:
            raise
        except RayError as error:
            raise JobFailedError(
                f"the coordinator does not answer ({_gist(error)}); run again to continue"
            ) from error


class Fleet:
    """Starts workers and notices their ends."""

    def __init__(self, run: str, coordinator: CoordinatorClient, engines: EngineSource) -> None:
        self._run = run
        self._coordinator = coordinator
        self._engines = engines
        self._alive: dict[int, _Incarnation] = {}

    @property
    def alive(self) -> list[int]:
        """Attempts that were started and have not ended."""
        return list(self._alive)

    def start(
        self, slot: Slot, spec: WorkerSpec, avoid: Collection[str], selector: Mapping[str, str]
    ) -> None:
        """Create the actor; Ray places it when there is room.

        That is on the slot's node; without one, on any with these labels but those to avoid.
        """
        options: dict[str, Any] = {
            "name": actor_name(self._run, spec.attempt),
            "namespace": NAMESPACE,
            "num_cpus": 1,
            "num_gpus": 1 if slot.device == "cuda" else 0,
            "resources": slot.pool.config.select.resource,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": CALLS_AT_ONCE,
            "runtime_env": _runtime_env(self._run),
        }
        if slot.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                slot.node.node_id, soft=False
            )
        else:
            avoided = {NODE_ID_LABEL: f"!in({','.join(sorted(avoid))})"} if avoid else {}
            options["label_selector"] = avoided | dict(selector)
        link = RayLink(self._coordinator.actor, spec.attempt, self._run)
        actor: Any = ray.remote(Worker).options(**options).remote(spec, link, self._engines)
        self._alive[spec.attempt] = _Incarnation(
            worker=spec.worker,
            attempt=spec.attempt,
            actor=actor,
            started_at=time.monotonic(),
            placing=actor.__ray_call__.remote(_find_place),
            running=actor.run.remote(),
        )

    def poll(self, timeout_seconds: float) -> Sequence[Placed | Ended]:
        """What happened, waiting no longer than this for the first event."""
        waited = {i.placing: i for i in self._alive.values() if i.placing is not None}
        waited |= {i.running: i for i in self._alive.values()}
        if not waited:
            time.sleep(timeout_seconds)
            return []
        ray.wait(list(waited), timeout=timeout_seconds)
        ready, _ = ray.wait(list(waited), num_returns=len(waited), timeout=0)
        events = [self._event(waited[reference], reference) for reference in ready]
        return [event for event in events if event is not None]

    def unplaced(self, after_seconds: float = 0.0) -> dict[int, str]:
        """Attempts that have waited longer than this for a place, and their workers."""
        latest = time.monotonic() - after_seconds
        return {
            i.attempt: i.worker
            for i in self._alive.values()
            if i.placing is not None and i.started_at <= latest
        }

    def nodes(self) -> list[Node]:
        """The nodes that there are now."""
        return cluster_nodes()

    def node_ids(self, names: Collection[str]) -> frozenset[str]:
        """The nodes that are meant by these ids or host names."""
        return frozenset(
            node.node_id for node in cluster_nodes() if node.node_id in names or node.host in names
        )

    def on_nodes(self, node_ids: Collection[str]) -> list[int]:
        """Attempts that run on these nodes."""
        return [i.attempt for i in self._alive.values() if i.node_id in node_ids]

    def is_live(self, node_id: str) -> bool:
        """Whether Ray still has this node."""
        return any(node.node_id == node_id for node in cluster_nodes())

    def resources(self) -> str:
        """What the cluster offers, for messages."""
        return free_resources()

    def tell_to_end(self, attempts: Iterable[int]) -> None:
        """Have these journal and end, sooner than by the answer to their next report."""
        for attempt in attempts:
            self._alive[attempt].actor.deliver.remote(Directions(drain=True))

    def kill(self, attempts: Iterable[int]) -> list[Any]:
        """End these at once, whatever they do; `poll` tells when they have.

        Returns references to what their nodes do about processes that do not listen to Ray.
        """
        incarnations = [self._alive[a] for a in attempts if a in self._alive]
        for incarnation in incarnations:
            _kill(incarnation.actor)
        return [
            _kill_process(self._run, i.place.pid, i.node_id)
            for i in incarnations
            if i.place is not None and i.node_id is not None
        ]

    def stop(self) -> None:
        """End every worker and the coordinator, at once."""
        with suppress(RayError):
            killing = self.kill(self._alive)
            if killing:
                ray.wait(killing, num_returns=len(killing), timeout=KILL_SECONDS)
        self._alive.clear()
        _kill(self._coordinator.actor)

    def _event(self, incarnation: _Incarnation, reference: Any) -> Placed | Ended | None:  # noqa: ANN401
        worker, attempt = incarnation.worker, incarnation.attempt
        if reference is incarnation.placing:
            incarnation.placing = None
            if _error_of(reference):
                return None
            incarnation.place, incarnation.node_id = ray.get(reference)
            return Placed(worker, attempt, incarnation.place, incarnation.node_id)
        del self._alive[attempt]
        _kill(incarnation.actor)
        return Ended(worker, attempt, _error_of(reference))


def _runtime_env(run: str) -> dict[str, Any]:
    """None of its own where the processes of this Ray carry the run's name already."""
    return {} if os.environ.get(RUN_VARIABLE) == run else {"env_vars": {RUN_VARIABLE: run}}


def _find_place(worker: Worker) -> tuple[Place, str]:
    """In a worker's process."""
    return Place(socket.gethostname(), os.getpid()), ray.get_runtime_context().get_node_id()


def _begin_log(service: CoordinatorService, store: Store, process: str) -> None:
    """In the coordinator's process."""
    log_to_file(store, process)
    logger.info("the coordinator is process %d on %s", os.getpid(), socket.gethostname())


def _kill(actor: Any) -> None:  # noqa: ANN401 - an actor handle
    with suppress(RayError):  # Ray itself may be gone, and the actor with it
        ray.kill(actor)


def _kill_process(run: str, pid: int, node_id: str) -> Any:  # noqa: ANN401 - an object reference
    """Have a node end a process that may not even listen to Ray any more."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    kill: Any = ray.remote(num_cpus=0, max_retries=0)(kill_if_of_run)
    return kill.options(scheduling_strategy=there).remote(run, pid)


def kill_if_of_run(run: str, pid: int) -> None:
    """End a process of this machine, if it still is one of this run."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        if f"{RUN_VARIABLE}={run}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
            b"\0"
        ):
            os.kill(pid, signal.SIGKILL)


def _error_of(reference: Any) -> Exception | None:  # noqa: ANN401 - an object reference
    """Why a call failed: the worker's own exception, or one that says its process is gone."""
    try:
        ray.get(reference)
    except RayTaskError as error:
        logger.debug("a worker failed", exc_info=error)
        return error.cause if isinstance(error.cause, Exception) else error
    except RayError as error:
        logger.debug("a worker is gone", exc_info=error)
        return JobFailedError(f"its process is gone: {_gist(error)}")
    return None


def _gist(error: Exception) -> str:
    """One line of Ray's many: the first, or a failed start's last, which names the exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "creation task" in lines[0] else lines[0]
