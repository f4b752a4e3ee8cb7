"""The files of one output directory: the one module that knows where they are and how to create them.

A name is relative to the output, like ``data/u00000001.parquet``. Creating a name is atomic: a
reader sees the whole file or none, and of several writers exactly one creates it. Temporaries
live in ``_bastion/tmp`` only, on the same file system, never beside what users read.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from bastion_batch.errors import OutputError

DATA = "data"
STEPS = "steps"
PRIVATE = "_bastion"
PLAN = "_bastion/plan.json"
TEMPORARY = "_bastion/tmp"
INVOCATIONS = "_bastion/invocations"
LOGS = "_bastion/logs"

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """An output on a local or shared POSIX file system.

    Args:
        root: the output directory.
        link: makes the final name of a finished temporary; fails where it exists.
    """

    def __init__(self, root: str | Path, *, link: Callable[[Path, Path], None] = os.link) -> None:
        self.root = Path(root)
        self._link = link

    def make_directories(self) -> None:
        """Create the output's directories and prove that one can write there.

        Raises:
            OutputError: naming the path and the reason.
        """
        try:
            for name in (DATA, STEPS, TEMPORARY, INVOCATIONS, LOGS):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / TEMPORARY / f"probe.{uuid4().hex}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise OutputError(
                f"output {self.root} cannot be written: {error.strerror} ({error.filename})"
            ) from None

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        """Create `name` with this content, durably; false where the name exists already.

        An `OSError` leaves open whether the name was created: look at what stands there.
        """
        final = self.root / name
        temporary = self.root / TEMPORARY / f"{final.name}.{uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            created = self._publish(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(final.parent)
        return created

    def _publish(self, temporary: Path, final: Path) -> bool:
        try:
            self._link(temporary, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if final.exists():
                return False
            temporary.replace(final)
        return True

    def exists(self, name: str) -> bool:
        """Whether the name exists."""
        return (self.root / name).exists()

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; none where there is no such directory."""
        path = self.root / directory
        return sorted(f"{directory}/{p.name}" for p in path.iterdir()) if path.is_dir() else []

    def read(self, name: str) -> bytes:
        """The whole content."""
        return (self.root / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        """The content as a seekable binary file."""
        return (self.root / name).open("rb")

    def remove(self, name: str) -> None:
        """Remove a name, if it exists."""
        (self.root / name).unlink(missing_ok=True)


Output = str | Path | LocalStore
"""An output directory, or the store that holds it."""


def open_store(output: Output) -> LocalStore:
    """The store of an output."""
    return output if isinstance(output, LocalStore) else LocalStore(output)


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


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
