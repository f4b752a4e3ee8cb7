"""The files of one output, wherever it is: the one way to reach them.

Creating a name is the commit, so a store promises three things. A reader of a name sees a whole
content or none. Where `conditional` holds, of several writers that create a name exactly one is
told that it did. An error leaves open what was done: look at what stands there.

    LocalStore     a POSIX file system, local or shared       bastion_batch.io.local_store
    ObjectStore    s3://, gs:// and any other fsspec URL      bastion_batch.io.object_store
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable
from uuid import uuid4

from bastion_batch.config import OutputConfig
from bastion_batch.errors import OutputError
from bastion_batch.io.layout import (
    DATA,
    INVOCATIONS,
    LOGS,
    PLAN,
    PRIVATE,
    STEPS,
    TEMPORARY,
)
from bastion_batch.io.local_store import LocalStore
from bastion_batch.io.retries import Retries

__all__ = [
    "DATA",
    "INVOCATIONS",
    "LOGS",
    "PLAN",
    "PRIVATE",
    "STEPS",
    "TEMPORARY",
    "LocalStore",
    "Output",
    "Store",
    "open_store",
    "prepare_output",
    "probe_conditional",
]


@runtime_checkable
class Store(Protocol):
    """One output. Names are relative to it. Every call may raise an `OSError`."""

    @property
    def root(self) -> str:
        """The output as messages show it: without credentials."""
        ...

    @property
    def conditional(self) -> bool:
        """Whether creating a name is atomic, as far as is known by now."""
        ...

    @property
    def retries(self) -> Retries:
        """How long a caller waits before it tries again what must not fail."""
        ...

    def make_directories(self) -> None:
        """Create what must be there before names are, and prove that one can write.

        Raises:
            OutputError: naming the path and the reason.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """The files of a folder, not of those in it, sorted; never from a cache of ours.

        A shared file system or an old object store may answer with the names of a moment ago.
        """
        ...

    def exists(self, name: str) -> bool:
        """Whether the name exists."""
        ...

    def read(self, name: str) -> bytes:
        """The whole content.

        Raises:
            FileNotFoundError: there is no such name.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """The content as a seekable binary file, read as it is asked for.

        Raises:
            FileNotFoundError: there is no such name.
        """
        ...

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        """Create a name, durably. False: it exists, made by anyone.

        It may have been made by this call itself, whose first answer was lost. Where
        `conditional` does not hold, a name that another writer creates now may be replaced.
        """
        ...

    def put(self, name: str, payload: bytes | memoryview) -> None:
        """Create or replace a name, durably."""
        ...

    def version(self, name: str) -> str | None:
        """Changes with the content; None where the name does not exist."""
        ...

    def replace_if(self, name: str, payload: bytes | memoryview, version: str) -> bool:
        """Replace a name that still has this version. False: it has another, or is gone.

        As with `put_if_absent`, the other version may be this call's own.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a name, if it exists."""
        ...


Output = str | Path | OutputConfig | Store
"""An output by its path or URL, by its part of a job, or the store that holds it."""


def open_store(output: Output) -> Store:
    """The store of an output. Cheap: a connection is made at the first use.

    A URL whose protocol is unknown, or whose package is not installed, is an `OutputError` then.
    """
    match output:
        case OutputConfig():
            return _open(output.path, output.storage_options)
        case str() | Path():
            return _open(str(output), {})
        case _:
            return output


def _open(path: str, storage_options: Mapping[str, Any]) -> Store:
    protocol, separator, rest = path.partition("://")
    if not separator:
        return LocalStore(path)
    if protocol in ("file", "local"):
        return LocalStore(rest)
    # fsspec is needed for URLs alone.
    from bastion_batch.io.object_store import ObjectStore

    return ObjectStore(path, storage_options)


def prepare_output(output: Output) -> None:
    """Create the output's directories.

    Raises:
        OutputError: one cannot write there, or `data/` holds files that no plan accounts for.
    """
    store = open_store(output)
    if store.names(DATA) and not store.exists(PLAN):
        raise OutputError(
            f"output {store.root} has files in data/ but no plan: it is not this job's;"
            " give another output.path"
        )
    store.make_directories()


def probe_conditional(output: Output) -> bool:
    """Whether creating a name is atomic in this output: one name is created twice, and removed.

    Where the second creation succeeds, the last writer of a name wins. A unit is still one file,
    because its name is a function of the unit.
    """
    store = open_store(output)
    name = f"{TEMPORARY}/probe-{uuid4().hex}"
    try:
        store.put_if_absent(name, b"first")
        created_twice = store.put_if_absent(name, b"second")
        return store.conditional and not created_twice
    finally:
        store.remove(name)
