"""The actors of one invocation: the coordinator and the workers' incarnations.

Imported only once a Ray is connected: its settings come from the environment. No actor is
detached, so that none outlives the driver; none is restarted by Ray, whose restarts would reuse
an attempt number.
"""

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bastion_batch.cluster.connect import NAMESPACE
from bastion_batch.cluster.engines import EngineSource
from bastion_batch.cluster.links import RayLink
from bastion_batch.cluster.messages import AttemptRecord, Ended, Placed, Progress
from bastion_batch.cluster.placement import Node, Slot
from bastion_batch.cluster.service import CoordinatorService
from bastion_batch.cluster.worker import Worker, WorkerSpec
from bastion_batch.errors import JobFailedError

CALL_SECONDS = 60.0

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


def cluster_nodes() -> list[Node]:
    """The live nodes of the connected Ray."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


class CoordinatorClient:
    """The driver's calls to the coordinator actor, which lives on the driver's node."""

    def __init__(self, name: str, units: dict[str, Any]) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.actor: Any = (
            ray.remote(num_cpus=0, max_restarts=0)(CoordinatorService)
            .options(name=name, namespace=NAMESPACE, scheduling_strategy=here)
            .remote(**units)
        )

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
        """Lease nothing more."""
        self._get(self.actor.drain.remote())

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

    def __init__(self, name: str, coordinator: CoordinatorClient, engines: EngineSource) -> None:
        self._name = name
        self._coordinator = coordinator
        self._engines = engines
        self._alive: dict[int, _Incarnation] = {}

    @property
    def num_alive(self) -> int:
        """Incarnations that were started and have not ended."""
        return len(self._alive)

    def start(self, slot: Slot, spec: WorkerSpec) -> None:
        """Create the actor; Ray places it when its node has room."""
        options: dict[str, Any] = {
            "name": f"{self._name}-{spec.worker}-{spec.attempt}",
            "namespace": NAMESPACE,
            "num_cpus": 1,
            "num_gpus": 1 if slot.device == "cuda" else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if slot.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                slot.node.node_id, soft=True
            )
        link = RayLink(self._coordinator.actor, spec.attempt)
        actor: Any = ray.remote(Worker).options(**options).remote(spec, link, self._engines)
        self._alive[spec.attempt] = _Incarnation(
            worker=spec.worker,
            attempt=spec.attempt,
            actor=actor,
            started_at=time.monotonic(),
            placing=actor.place.remote(),
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

    def unplaced(self, after_seconds: float) -> list[str]:
        """Workers that have waited longer than this for a place."""
        latest = time.monotonic() - after_seconds
        return [
            i.worker
            for i in self._alive.values()
            if i.placing is not None and i.started_at < latest
        ]

    def stop(self) -> None:
        """End every worker and the coordinator, at once."""
        actors = [incarnation.actor for incarnation in self._alive.values()]
        self._alive.clear()
        for actor in [*actors, self._coordinator.actor]:
            with suppress(RayError):  # Ray itself may be gone, and they with it
                ray.kill(actor)

    def _event(self, incarnation: _Incarnation, reference: Any) -> Placed | Ended | None:  # noqa: ANN401
        worker, attempt = incarnation.worker, incarnation.attempt
        if reference is incarnation.placing:
            incarnation.placing = None
            error = _error_of(reference)
            return None if error else Placed(worker, attempt, ray.get(reference))
        del self._alive[attempt]
        ray.kill(incarnation.actor)
        return Ended(worker, attempt, _error_of(reference))


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
