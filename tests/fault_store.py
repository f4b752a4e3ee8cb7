"""A store in memory, and one that breaks on demand: for tests of everything that commits.

    memory = MemoryStore(conditional=True)               # one output, shared by all its writers
    store = FaultStore(memory, decide)                   # one writer's broken view of it

`decide(op, name)` is asked once at every call, before it is made; `op` is the name of the method,
`name` its first argument (a folder for `names`, "" for `make_directories`). It returns what goes
wrong at this call, or None. A seeded schedule is a `decide` over a `random.Random`.

    Fault.CRASH_BEFORE   raises `Crash`; nothing was done
    Fault.CRASH_AFTER    the call is made, then `Crash`
    Fault.ERROR_BEFORE   raises an `OSError`; nothing was done
    Fault.ERROR_AFTER    the call is made, and answered with an `OSError`
    Fault.LATE           answered with a time-out now, and made later, by `FaultStore.land()`:
                         a request still under way when its sender has given up, or is dead
    Fault.STALE          `names` answers with what an earlier call of this writer saw (nothing at
                         first); every other call is made as it should be

`Crash` is a `BaseException`: nothing of ours may catch it. After one, throw the writer's objects
away: its process is gone. With `MemoryStore(conditional=False)` the last writer of a name wins,
like an object store that ignores If-None-Match: `put_if_absent` always writes and returns True.

Both keep counts: `FaultStore.num_calls`, and `MemoryStore.contents` holds the files themselves.
"""

import errno
import io
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, BinaryIO

from bastion_batch.io.retries import NO_RETRIES, Retries
from bastion_batch.io.store import Store


class Crash(BaseException):
    """The process is gone."""


class Fault(Enum):
    """What goes wrong at a call."""

    CRASH_BEFORE = auto()
    CRASH_AFTER = auto()
    ERROR_BEFORE = auto()
    ERROR_AFTER = auto()
    LATE = auto()
    STALE = auto()


Decide = Callable[[str, str], Fault | None]

_LATE_CAPABLE = ("put_if_absent", "put", "replace_if", "remove")


class MemoryStore:
    """An output in a dictionary. Every call is atomic. Not for more than one process."""

    def __init__(
        self,
        *,
        conditional: bool = True,
        root: str = "memory",
        retries: Retries = NO_RETRIES,
    ) -> None:
        self.root = root
        self.conditional = conditional
        self.retries = retries
        self.contents: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        self._num_writes = 0

    def make_directories(self) -> None:
        """There are none."""

    def names(self, folder: str) -> list[str]:
        depth = folder.count("/") + 1
        return sorted(
            name
            for name in self.contents
            if name.startswith(f"{folder}/") and name.count("/") == depth
        )

    def exists(self, name: str) -> bool:
        return name in self.contents

    def read(self, name: str) -> bytes:
        if name not in self.contents:
            raise FileNotFoundError(errno.ENOENT, "no such name", name)
        return self.contents[name]

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        if self.conditional and name in self.contents:
            return False
        self.put(name, payload)
        return True

    def put(self, name: str, payload: bytes | memoryview) -> None:
        self._num_writes += 1
        self.contents[name] = bytes(payload)
        self._versions[name] = self._num_writes

    def version(self, name: str) -> str | None:
        return str(self._versions[name]) if name in self.contents else None

    def replace_if(self, name: str, payload: bytes | memoryview, version: str) -> bool:
        if self.version(name) != version:
            return False
        self.put(name, payload)
        return True

    def remove(self, name: str) -> None:
        self.contents.pop(name, None)


class FaultStore:
    """Passes every call on to `inner`, except where `decide` has it go wrong."""

    def __init__(self, inner: Store, decide: Decide, *, retries: Retries | None = None) -> None:
        self.inner = inner
        self.retries = retries or inner.retries
        self.num_calls = 0
        self._decide = decide
        self._seen: dict[str, list[str]] = {}
        self._under_way: list[Callable[[], object]] = []

    @property
    def root(self) -> str:
        return self.inner.root

    @property
    def conditional(self) -> bool:
        return self.inner.conditional

    @property
    def num_under_way(self) -> int:
        """Requests that were answered with a time-out and not yet made."""
        return len(self._under_way)

    def land(self) -> None:
        """Make the oldest request that is under way; its answer reaches nobody."""
        if self._under_way:
            self._under_way.pop(0)()

    def make_directories(self) -> None:
        self._call("make_directories")

    def names(self, folder: str) -> list[str]:
        return self._call("names", folder)

    def exists(self, name: str) -> bool:
        return self._call("exists", name)

    def read(self, name: str) -> bytes:
        return self._call("read", name)

    def open(self, name: str) -> BinaryIO:
        return self._call("open", name)

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        return self._call("put_if_absent", name, payload)

    def put(self, name: str, payload: bytes | memoryview) -> None:
        self._call("put", name, payload)

    def version(self, name: str) -> str | None:
        return self._call("version", name)

    def replace_if(self, name: str, payload: bytes | memoryview, version: str) -> bool:
        return self._call("replace_if", name, payload, version)

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def _call(self, op: str, name: str = "", *arguments: Any) -> Any:
        self.num_calls += 1
        fault = self._decide(op, name)
        method = getattr(self.inner, op)

        def make() -> Any:
            return method(name, *arguments) if op != "make_directories" else method()

        if fault is Fault.CRASH_BEFORE:
            raise Crash(op, name)
        if fault is Fault.ERROR_BEFORE:
            raise OSError(errno.EIO, "not done", name)
        if fault is Fault.LATE and op in _LATE_CAPABLE:
            self._under_way.append(make)
            raise TimeoutError(errno.ETIMEDOUT, "no answer yet", name)
        if fault is Fault.STALE and op == "names":
            return list(self._seen.get(name, []))
        result = make()
        if op == "names":
            self._seen[name] = list(result)
        if fault in (Fault.CRASH_AFTER, Fault.ERROR_AFTER) and op == "open":
            result.close()
        if fault is Fault.CRASH_AFTER:
            raise Crash(op, name)
        if fault is Fault.ERROR_AFTER:
            raise OSError(errno.EIO, "done, and answered with an error", name)
        return result
