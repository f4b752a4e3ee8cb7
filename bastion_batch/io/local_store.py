"""An output on a POSIX file system, local or shared: NFS, Lustre, a bucket behind FUSE.

A file is written and made durable under a temporary name in `_bastion/tmp`, on the same file
system, and then gets its final name: by a hard link, which fails where the name exists, or by a
rename, which replaces. File systems without hard links (SMB, many FUSE mounts) have the rename
alone, behind a look at the name: `conditional` turns false when that is found out.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from bastion_batch.errors import OutputError
from bastion_batch.io.layout import DATA, INVOCATIONS, JOURNAL, LOGS, PRIVATE, STEPS, TEMPORARY
from bastion_batch.io.retries import Retries

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_REPLACE_LOCK = f"{PRIVATE}/replace.lock"


class LocalStore:
    """A store of files.

    Args:
        root: the output directory.
        link: makes the final name of a finished temporary; fails where it exists.
        retries: for callers that must not fail.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        link: Callable[[Path, Path], None] = os.link,
        retries: Retries | None = None,
    ) -> None:
        self.root = str(root)
        self.conditional = True
        self.retries = retries or Retries()
        self._link = link

    def path(self, name: str) -> Path:
        """Where a name is."""
        return Path(self.root, name)

    def make_directories(self) -> None:
        """Create the output's directories and prove that one can write there.

        Raises:
            OutputError: naming the path and the reason.
        """
        try:
            for name in (DATA, STEPS, TEMPORARY, INVOCATIONS, JOURNAL, LOGS):
                self.path(name).mkdir(parents=True, exist_ok=True)
            probe = self.path(f"{TEMPORARY}/probe.{uuid4().hex}")
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise OutputError(
                f"output {self.root} cannot be written: {error.strerror} ({error.filename})"
            ) from None

    def names(self, folder: str) -> list[str]:
        """The files of a folder, sorted; none where there is no such folder."""
        try:
            with os.scandir(self.path(folder)) as entries:
                return sorted(f"{folder}/{entry.name}" for entry in entries if entry.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, name: str) -> bool:
        """Whether the name exists."""
        return self.path(name).exists()

    def read(self, name: str) -> bytes:
        """The whole content."""
        return self.path(name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        """The content as a seekable binary file."""
        return self.path(name).open("rb")

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        """Create `name` with this content, durably; false where the name exists already."""
        final = self.path(name)
        with self._temporary(final, payload) as temporary:
            created = self._publish(temporary, final)
        _sync_directory(final.parent)
        return created

    def put(self, name: str, payload: bytes | memoryview) -> None:
        """Create or replace a name, durably; a reader sees the old content or the new."""
        final = self.path(name)
        with self._temporary(final, payload) as temporary:
            temporary.replace(final)
        _sync_directory(final.parent)

    def version(self, name: str) -> str | None:
        """Which file stands under the name."""
        try:
            status = self.path(name).stat()
        except FileNotFoundError:
            return None
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"

    def replace_if(self, name: str, payload: bytes | memoryview, version: str) -> bool:
        """Replace a name that still has this version: under a lock that all replacers take."""
        with self.path(_REPLACE_LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.version(name) != version:
                return False
            self.put(name, payload)
            return True

    def remove(self, name: str) -> None:
        """Remove a name, if it exists."""
        self.path(name).unlink(missing_ok=True)

    @contextmanager
    def _temporary(self, final: Path, payload: bytes | memoryview) -> Generator[Path]:
        """A durable file with this content, for as long as it has no other name."""
        temporary = self.path(f"{TEMPORARY}/{final.name}.{uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _publish(self, temporary: Path, final: Path) -> bool:
        try:
            self._link(temporary, final)
        except OSError as error:
            if _is_same_file(temporary, final):
                return True  # done, and answered with an error
            if error.errno == errno.EEXIST:
                return False
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._publish_without_link(temporary, final)
        return True

    def _publish_without_link(self, temporary: Path, final: Path) -> bool:
        self.conditional = False
        if final.exists():
            return False
        temporary.replace(final)
        return True


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


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
