"""An output in an object store, or in whatever else fsspec has a URL for.

An object appears whole when its request ends, so there are no temporaries and no directories. A
call that fails is made again, with pauses, as long as its error may pass: the server may have
done the first request and lost the answer, and then the second finds its own object there.
"""

import errno
import io
import posixpath
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from bastion_batch.errors import InputError, OutputError
from bastion_batch.io.conditions import Conditions, conditions_of
from bastion_batch.io.filesystems import open_filesystem, without_credentials
from bastion_batch.io.layout import TEMPORARY
from bastion_batch.io.retries import Retries

T = TypeVar("T")

_READ_AHEAD_BYTES = 1 << 18


class ObjectStore:
    """A store of objects.

    Args:
        url: of the output, like ``s3://bucket/answers``.
        storage_options: for the file system; never shown.
        retries: for its own requests, and for callers that must not fail.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        retries: Retries | None = None,
    ) -> None:
        self.root = without_credentials(url.rstrip("/"))
        self.retries = retries or Retries()
        self._url = url
        self._storage_options = dict(storage_options or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Connections stay behind: each process makes its own."""
        again = partial(ObjectStore, retries=self.retries)
        return again, (self._url, self._storage_options)

    @property
    def conditional(self) -> bool:
        """Whether creating an object is atomic, as far as is known by now."""
        return self._conditions.conditional

    def make_directories(self) -> None:
        """Prove that one can write there.

        Raises:
            OutputError: naming the URL and the reason.
        """
        name = f"{TEMPORARY}/probe-{uuid4().hex}"
        try:
            self.put(name, b"")
            self.remove(name)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"output {self.root} cannot be written: {reason}") from error

    def names(self, folder: str) -> list[str]:
        """The objects of a folder, sorted; none where there is no such folder."""
        return self._insist(f"listing {folder}", lambda: self._names(folder))

    def exists(self, name: str) -> bool:
        """Whether the name exists."""
        return self._insist(f"looking for {name}", lambda: self._size(name) is not None)

    def read(self, name: str) -> bytes:
        """The whole content."""
        path = self._path(name)
        return self._insist(f"reading {name}", lambda: self._fs.cat_file(path))

    def open(self, name: str) -> BinaryIO:
        """The content as a seekable binary file, fetched as it is asked for."""
        size = self._insist(f"looking for {name}", lambda: self._size(name))
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.root}/{name}")
        path = self._path(name)

        def fetch(start: int, end: int) -> bytes:
            return self._insist(
                f"reading {name}", lambda: self._fs.cat_file(path, start=start, end=end)
            )

        return io.BufferedReader(RangeReader(fetch, size), _READ_AHEAD_BYTES)

    def put_if_absent(self, name: str, payload: bytes | memoryview) -> bool:
        """Create an object; false where it exists, made by anyone, perhaps by this very call."""
        path, content = self._path(name), bytes(payload)
        return self._insist(f"creating {name}", lambda: self._conditions.create(path, content))

    def put(self, name: str, payload: bytes | memoryview) -> None:
        """Create or replace an object."""
        path, content = self._path(name), bytes(payload)
        self._insist(f"writing {name}", lambda: self._fs.pipe_file(path, content))

    def version(self, name: str) -> str | None:
        """What the store calls this content."""
        path = self._path(name)
        return self._insist(f"looking for {name}", lambda: self._conditions.version(path))

    def replace_if(self, name: str, payload: bytes | memoryview, version: str) -> bool:
        """Replace an object that still has this version."""
        path, content = self._path(name), bytes(payload)
        return self._insist(
            f"replacing {name}", lambda: self._conditions.replace(path, content, version)
        )

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        self._insist(f"removing {name}", lambda: self._remove(name))

    @cached_property
    def _fs(self) -> Any:  # noqa: ANN401 - file systems differ in what they take
        try:
            return open_filesystem(self._url, self._storage_options)
        except InputError as error:
            raise OutputError(f"output {error}") from None

    @cached_property
    def _base(self) -> str:
        return self._fs._strip_protocol(self._url).rstrip("/")

    @cached_property
    def _conditions(self) -> Conditions:
        return conditions_of(self._url, self._fs)

    def _insist(self, what: str, request: Callable[[], T]) -> T:
        def one_try() -> T:
            with self._conditions.errors():
                return request()

        return self.retries.call(one_try, what=f"{self.root}: {what}")

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _names(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        files = (e["name"] for e in entries if e["type"] == "file" and e["name"] != path)
        return sorted(f"{folder}/{posixpath.basename(name)}" for name in files)

    def _size(self, name: str) -> int | None:
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return info["size"] if info["type"] == "file" else None

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))


class RangeReader(io.RawIOBase):
    """An object read in ranges: each read is one request.

    Args:
        fetch: the bytes from one place to another.
        size: of the object.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, without a request."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        """Fetch as much as fits, short of it only at the end."""
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        content = self._fetch(self._position, end)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
