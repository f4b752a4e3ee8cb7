"""A driver and its workers on a simulated clock.

Real are the coordinator, the workers, the plan, the journal, the commits and the rules of restart.
Stand-ins are the engine, the supervisor's loop, and Ray.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from balances import MovingBalance

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.faults import POISON_ENDS
from bastion_batch.cluster.invocation import coordinator_units
from bastion_batch.cluster.mail import Mail
from bastion_batch.cluster.messages import Ended, InFlight
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.scripted import ScriptedEngine, ScriptedEngines
from bastion_batch.cluster.worker import Worker, WorkerSpec
from bastion_batch.config import JobConfig
from bastion_batch.errors import InputError, JobFailedError, OutputError
from bastion_batch.io.commit import claim_invocation, committed_units, remove_orphan_steps
from bastion_batch.io.journal import remove_journal
from bastion_batch.io.layout import attempt_of
from bastion_batch.io.plan import Plan
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import prove_complete
from bastion_batch.io.store import Store
from bastion_batch.records import RowKey
from simulation.post import GOODBYE_SECONDS, CoordinatorGone, Post, SimulatedLink
from simulation.settings import Settings
from simulation.storage import Storage
from simulation.watched import WatchedStore
from simulation.world import Process, Violation, World

MAX_INVOCATIONS = 60


class Interrupted(Exception):
    """How a driver ends that was told to."""


DRIVER_ERRORS = OSError | JobFailedError | OutputError | Interrupted
"""With which a driver may end. Storage that fails may look like a damaged plan."""
WORKER_ERRORS = OSError | CoordinatorGone


class SimulatedEngine(ScriptedEngine):
    """Takes its time on a simulated clock, and remembers what it has ended."""

    def __init__(self, finished: set[RowKey], **settings: Any) -> None:
        super().__init__(**settings)
        self._finished = finished

    def step(self):
        completions = super().step()
        self._finished.update((c.row_id, c.sample_index) for c in completions if c.fault is None)
        return completions


class SimulatedEngines:
    """Builds the engine of one worker; all that a worker asks of an `EngineSource`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def auto_dtype(self, device):
        return "float32"

    def build(self, job, device, share):
        return SimulatedEngine(**self._settings)


@dataclass(eq=False)
class Life:
    """One run of the job command, from its start to its end or its death."""

    process: Process
    coordinator: Coordinator | None = None
    balance: MovingBalance | None = None
    gone: bool = False
    """Whether its workers have been told that it is dead."""
    ends_at: float | None = None
    """Once it was told to end: until when it waits for its workers."""
    leaving: set[int] = field(default_factory=set)
    """Attempts that were told to leave their machine."""
    rows: dict[int, tuple[InFlight, ...]] = field(default_factory=dict)
    """What each attempt reported last."""
    had: dict[int, set[RowKey]] = field(default_factory=dict)
    """Whatever each attempt reported of its engine."""
    finished: dict[int, set[RowKey]] = field(default_factory=dict)
    """What each attempt's engine has ended."""
    ended: list[Ended] = field(default_factory=list)
    workers: dict[int, Worker] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)

    def living(self) -> list[Process]:
        """Its workers' processes."""
        return [process for process in self.processes.values() if process.alive]

    def note_rows(self, attempt: int, rows: tuple[InFlight, ...]) -> None:
        """A worker reports these."""
        self.rows[attempt] = rows
        had = self.had.setdefault(attempt, set())
        had.update((row.row_id, row.sample_index) for row in rows if row.live)

    def deliver(self, attempt: int, mail: Mail) -> None:
        """Hand a message to a worker, if it lives."""
        process = self.processes.get(attempt)
        if process is not None and process.alive:
            self.workers[attempt].deliver(mail)


class Member(NamedTuple):
    """A worker that lives, of a driver that lives."""

    life: Life
    worker: str
    attempt: int
    process: Process


class Cluster:
    """Runs one job to its end, by as many invocations as it takes."""

    coordinator: Callable[..., Coordinator] = Coordinator

    def __init__(
        self, world: World, memory: WatchedStore, job: JobConfig, settings: Settings
    ) -> None:
        self.world = world
        self.storage = Storage(world, memory, settings)
        self.post = Post(world, memory, settings)
        self.done = False
        self.lives: list[Life] = []
        self._memory = memory
        self._job = job
        self._settings = settings
        self._num_ends: Counter[RowKey] = Counter()
        memory.may_be_poison = lambda key: self._num_ends[key] >= POISON_ENDS

    def members(self) -> list[Member]:
        """The workers that their drivers count on."""
        return [
            Member(life, process.name.split("-")[0], attempt, process)
            for life in self.lives
            if life.process.alive
            for attempt, process in life.processes.items()
            if process.alive
        ]

    def rows_of(self, unit: int) -> list[RowKey]:
        """What is to be decoded of a unit."""
        return self._memory.rows_of(unit)

    def tell_end(self, member: Member, error: Exception | None = None) -> None:
        """A driver learns that a worker has ended, be it so or not."""
        event = Ended(member.worker, member.attempt, error)
        self.world.at(self.world.later(1.0), partial(member.life.ended.append, event))

    # What sabotage replaces

    def open_plan(self, store: Store) -> Plan:
        """The plan, made by the first driver."""
        return open_plan(self._job, ScriptedEngines().check(self._job), store)

    def store_of(self, process: Process) -> Store:
        """A process's own way to storage."""
        return self.storage.of(process)

    # Drivers

    def start_driver(self) -> None:
        """Give the job command."""
        number = len(self.lives) + 1
        if number > MAX_INVOCATIONS:
            raise Violation(f"not done after {MAX_INVOCATIONS} invocations")
        process = self.world.spawn(f"d{number}", lambda process: self._drive(life))
        life = Life(process)
        process.on_end = partial(self._driver_ended, life)
        self.lives.append(life)

    def _drive(self, life: Life) -> None:
        """What `run` does."""
        store = self.store_of(life.process)
        plan = self.open_plan(store)
        done = committed_units(store)
        if len(done) < plan.num_units:
            self._supervise(life, store, plan, done, claim_invocation(store))
        at_work = {a for each in self.lives for a, p in each.processes.items() if p.alive}
        remove_orphan_steps(store, plan)
        remove_journal(store, range(plan.num_units))
        self._prove(life, store, plan)
        self._check_orphans(plan, at_work)
        self.done = True

    def _supervise(self, life: Life, store: Store, plan: Plan, done: set[int], number: int) -> None:
        """What `Supervisor` does."""
        restarts = Restarts(self._settings.paces, number, rng=self.world.random.random)
        units = coordinator_units(plan)._asdict()

        def balance(**units: Any) -> MovingBalance:
            life.balance = MovingBalance(**units)
            return life.balance

        life.coordinator = coordinator = self.coordinator(**units, done=done, balance=balance)
        while not coordinator.progress(self.world.now).finished:
            for name in restarts.due(self.world.now):
                if life.ends_at is None:
                    self._start_worker(life, plan, name, restarts.started(name))
            while life.ended:
                self._replace(store, life, restarts, life.ended.pop(0))
            if life.ends_at is not None and (life.ends_at < self.world.now or not life.living()):
                raise Interrupted
            life.process.sleep(0.2 * self._settings.scale)
        life.process.wait(GOODBYE_SECONDS, lambda: not life.living())

    def _replace(self, store: Store, life: Life, restarts: Restarts, event: Ended) -> None:
        coordinator, now = life.coordinator, self.world.now
        assert coordinator is not None
        self._num_ends.update(life.had.pop(event.attempt, ()))
        coordinator.worker_lost(event.attempt, committed_units(store), now)
        if event.attempt in life.leaving:
            restarts.left(event.worker, now)
            return
        attempts = coordinator.attempts()
        fruitful = any(a.attempt == event.attempt and a.num_finished for a in attempts)
        mendable = not isinstance(event.error, InputError)
        restarts.died(event.worker, now, fruitful=fruitful, mendable=mendable)
        if restarts.all_removed:
            raise JobFailedError("no worker is left")

    def _prove(self, life: Life, store: Store, plan: Plan) -> None:
        try:
            prove_complete(store, plan)
        except JobFailedError as error:
            if life.process.name in self.storage.misled:
                raise
            raise Violation(f"the coordinator said that the job is finished: {error}") from error
        self._memory.require_complete(plan)

    def _check_orphans(self, plan: Plan, at_work: set[int]) -> None:
        """Steps files that count for nothing are gone, except those of who was still at work."""
        left = {name for name in self._memory.orphans if attempt_of(name) not in at_work}
        may_be_there = self.storage.misled or self.storage.num_late or not plan.conditional_put
        if left and not may_be_there:
            raise Violation(f"left behind: {sorted(left)}")

    def _driver_ended(self, life: Life) -> None:
        error = life.process.error
        self.world.note(life.process.name, "is done" if self.done else f"ends: {error!r}")
        if error is not None and not isinstance(error, DRIVER_ERRORS):
            raise error
        lasting = self.world.random.choice([1.0, 20.0])
        for process in life.living():
            self.world.at(self.world.later(lasting), process.kill)
        self.world.at(self.world.later(0.5), lambda: setattr(life, "gone", True))
        if not self.done:
            self.world.at(0.1 + self.world.later(2.0), self._again)

    def _again(self) -> None:
        if not self.done and not any(life.process.alive for life in self.lives):
            self.start_driver()

    # Workers

    def _start_worker(self, life: Life, plan: Plan, name: str, attempt: int) -> None:
        spec = WorkerSpec(
            worker=name,
            attempt=attempt,
            job=self._job,
            job_id=plan.job_id,
            inputs=plan.inputs,
            steps=plan.steps,
            device="cpu",
            workers_on_node=1,
        )
        process = self.world.spawn(f"{name}-{attempt}", lambda p: self._work(life, p, spec))
        process.on_end = partial(self._worker_ended, Member(life, name, attempt, process))
        life.processes[attempt] = process

    def _work(self, life: Life, process: Process, spec: WorkerSpec) -> None:
        """What `Worker.run` does."""
        engines = SimulatedEngines(
            finished=life.finished.setdefault(spec.attempt, set()),
            sleep=process.sleep,
            max_batch=self._settings.max_batch,
            step_seconds=self._settings.paces[spec.worker],
            harm=self._settings.harm,
        )
        link = SimulatedLink(self.post, life, process, spec.attempt)
        store = self.store_of(process)
        worker = Worker(spec, link, engines, self.world.clock, process.sleep, store)
        life.workers[spec.attempt] = worker
        try:
            process.sleep(self.world.later(1.0))
            worker.start(worker.shared_plan())
            turned_at = self.world.now
            while worker.turn():
                if self.world.now == turned_at:
                    process.sleep(0.001)
                turned_at = self.world.now
            worker.finish()
        except Exception:
            worker.abort()
            raise
        finally:
            worker.close()

    def _worker_ended(self, member: Member) -> None:
        error = member.process.error
        self.world.note(member.process.name, f"ends: {error!r}")
        self.post.died(member.attempt)
        if member.process.ended_in_order and member.process.name not in self.storage.failed:
            self._require_saved(member)
        is_harm = bool(self._settings.harm) and "CUDA" in str(error)
        if error is not None and not is_harm and not isinstance(error, WORKER_ERRORS):
            raise error
        self.tell_end(member, error)

    def _require_saved(self, member: Member) -> None:
        """What a worker has finished is in a file when it ends in order."""
        finished = member.life.finished.get(member.attempt, set())
        for unit in self._memory.open_units():
            keys = finished.intersection(self.rows_of(unit))
            if keys:
                self.post.require_journaled(unit, keys, f"finished by {member.process.name}")
