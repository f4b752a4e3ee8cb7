"""Bugs that once were somebody's, each as a cluster that has it. The checks must find them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.io.layout import DATA, JOURNAL, STEPS, steps_name, unit_of
from simulation.cluster import Cluster


class _Proxy:
    """A store with one thing done otherwise."""

    def __init__(self, inner: Any, attempt: int) -> None:
        self._inner = inner
        self._attempt = attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _DataFirst(_Proxy):
    def __init__(self, inner, attempt):
        super().__init__(inner, attempt)
        self._held = []

    def put(self, name, payload):
        if name.startswith(STEPS):
            self._held.append((name, payload))
        else:
            self._inner.put(name, payload)

    def put_if_absent(self, name, payload):
        created = self._inner.put_if_absent(name, payload)
        while self._held:
            self._inner.put(*self._held.pop())
        return created


class _TakenMeansLost(_Proxy):
    def put_if_absent(self, name, payload):
        try:
            created = self._inner.put_if_absent(name, payload)
        except OSError:
            created = self._inner.put_if_absent(name, payload)
        if not created and name.startswith(DATA):
            self._inner.remove(steps_name(unit_of(name), self._attempt))
        return created


class _ForgetsJournal(_Proxy):
    def put(self, name, payload):
        if not name.startswith(JOURNAL):
            self._inner.put(name, payload)


class _WritesInPlace(_Proxy):
    def put_if_absent(self, name, payload):
        if name.startswith(DATA) and not self._inner.exists(name):
            self._inner.put(name, payload[: len(payload) // 2])
            self._inner.put(name, payload)
            return True
        return self._inner.put_if_absent(name, payload)


def _with_store(proxy: type[_Proxy]) -> type[Cluster]:
    class Sabotaged(Cluster):
        def store_of(self, process):
            _, _, attempt = process.name.partition("-")
            return proxy(super().store_of(process), int(attempt or 0))

    return Sabotaged


class _KeepsUnitsOfTheLost(Coordinator):
    """Nobody else gets them."""

    def worker_lost(self, attempt, committed, now):
        pass


class _BelievesTheLost(Coordinator):
    """Takes what a lost worker had open for committed."""

    def worker_lost(self, attempt, committed, now):
        state = self._attempts.get(attempt)
        super().worker_lost(attempt, state.units if state else committed, now)


def _with_coordinator(kind: type[Coordinator]) -> type[Cluster]:
    class Sabotaged(Cluster):
        coordinator = kind

    return Sabotaged


class _TidiesFirst(Cluster):
    """Removes steps files that no unit names yet."""

    def open_plan(self, store):
        plan = super().open_plan(store)
        for name in sorted(self._memory.orphans):
            store.remove(name)
        return plan


class _TrustsOverwriting(Cluster):
    """Takes every store for one that creates atomically."""

    def open_plan(self, store):
        return replace(super().open_plan(store), conditional_put=True)


class Sabotage(NamedTuple):
    """A bug, and settings that bring it to light."""

    kind: type[Cluster]
    settings: Mapping[str, Any]


_LATE_WRITERS = {"hold_rate": 0.6, "pause_rate": 0.0, "num_faults": 0, "num_accidents": 0}
_ZOMBIES = _LATE_WRITERS | {"forsake_rate": 1.0}
_ORPHANS = _LATE_WRITERS | {"forsake_rate": 0.0, "orphan_rate": 0.7}
_LOST_ANSWERS = {"hold_rate": 0.0, "fault_rate": 0.12, "num_accidents": 0}

SABOTAGE = {
    "data before steps": Sabotage(_with_store(_DataFirst), {}),
    "data written in place": Sabotage(_with_store(_WritesInPlace), {}),
    "a taken name means lost": Sabotage(_with_store(_TakenMeansLost), _LOST_ANSWERS),
    "acknowledged before journaled": Sabotage(_with_store(_ForgetsJournal), {}),
    "units of the lost kept": Sabotage(_with_coordinator(_KeepsUnitsOfTheLost), {}),
    "units of the lost believed done": Sabotage(_with_coordinator(_BelievesTheLost), {}),
    "steps removed before the end": Sabotage(_TidiesFirst, _ORPHANS),
    "overwriting taken for creating": Sabotage(
        _TrustsOverwriting, _ZOMBIES | {"conditional": False}
    ),
}
