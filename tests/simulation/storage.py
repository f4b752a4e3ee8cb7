"""Every process's own way to storage, on which things go wrong as the settings say."""

from collections.abc import Callable

from fault_store import Fault, FaultStore

from bastion_batch.io.layout import DATA
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import Store
from simulation.settings import Settings
from simulation.watched import WatchedStore
from simulation.world import Process, World

_WRITES = ("put_if_absent", "put", "remove")
_ALWAYS = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.ERROR_BEFORE, Fault.ERROR_AFTER)
LATE_SECONDS = 5.0
"""How long a request is under way that was answered with a time-out, on average."""
HOLD_SECONDS = (2.0, 5.0, 60.0)


class Storage:
    """One store in memory, and its faults."""

    def __init__(self, world: World, memory: WatchedStore, settings: Settings) -> None:
        self.memory = memory
        self.faults_met: set[tuple[str, str, Fault]] = set()
        """Method, folder and fault of every call that went wrong."""
        self.failed: set[str] = set()
        """Processes that met a fault."""
        self.misled: set[str] = set()
        """Processes that were shown an old listing."""
        self.num_late = 0
        """Requests that are made after their senders have given up on them."""
        self.on_hold: Callable[[Process], None] = lambda process: None
        """Called when a process is held up before it creates a data file."""
        self._world = world
        self._settings = settings
        self._num_faults = settings.num_faults

    def of(self, process: Process) -> Store:
        """The store as a process sees it."""
        retries = Retries(
            num_tries=self._settings.num_tries,
            sleep=process.sleep,
            rng=self._world.random.random,
        )

        def decide(op: str, name: str) -> Fault | None:
            process.check_alive()
            self._delay(process, op, name)
            fault = self._fault(op, name)
            shown = "a probe" if "/probe-" in name else name
            self._world.note(process.name, op, shown, fault.name if fault else "")
            if fault is not None:
                self.failed.add(process.name)
            if fault in (Fault.CRASH_BEFORE, Fault.CRASH_AFTER):
                process.die()
            if fault is Fault.LATE:
                self.num_late += 1
                self._world.at(self._world.later(LATE_SECONDS), land)
            if fault is Fault.STALE:
                self.misled.add(process.name)
            return fault

        def land() -> None:
            self._world.note(process.name, "a late request lands")
            store.land()

        store = FaultStore(self.memory, decide, retries=retries)
        return store

    def _delay(self, process: Process, op: str, name: str) -> None:
        """Hold a process up; now and then until nobody expects its data file any more."""
        random = self._world.random
        if random.random() < self._settings.pause_rate:
            process.sleep(self._world.later(self._settings.pause))
        is_commit = op == "put_if_absent" and name.startswith(DATA)
        if is_commit and random.random() < self._settings.hold_rate:
            self._world.note(process.name, "is held up")
            self.on_hold(process)
            process.sleep(self._world.soon(random.choice(HOLD_SECONDS)))

    def _fault(self, op: str, name: str) -> Fault | None:
        """What goes wrong at this call; most often where most hangs on it."""
        random = self._world.random
        writes = op in _WRITES
        weight = 4.0 if writes and name.startswith(DATA) else 1.0 if writes else 0.25
        if not self._num_faults or random.random() >= weight * self._settings.fault_rate:
            return None
        late, stale = writes, op == "names" and self._settings.stale
        fault = random.choice([*_ALWAYS, *[Fault.LATE] * late, *[Fault.STALE] * stale])
        self._num_faults -= 1
        self.faults_met.add((op, name.partition("/")[0], fault))
        return fault
