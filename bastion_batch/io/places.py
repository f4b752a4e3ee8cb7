"""Where input files are: on this machine, or behind a URL that fsspec knows.

A place finds the files that a path names, says in what state one is, and opens it. The state is
what a file is known again by: its size and either the ETag that an object store gives its content
or a digest of its head and tail. Clocks never count.
"""

import glob
import io
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from bastion_batch.errors import DataError
from bastion_batch.io.conditions import conditions_of
from bastion_batch.io.filesystems import open_filesystem, without_credentials
from bastion_batch.io.object_store import RangeReader
from bastion_batch.io.retries import Retries

T = TypeVar("T")

_SUFFIXES = (".jsonl", ".parquet")
SUPPORTED = "plain JSONL and Parquet files (.jsonl, .parquet) are supported now"
_END_BYTES = 1 << 16
_READ_AHEAD_BYTES = 1 << 20


class State(NamedTuple):
    """What a file is known again by."""

    num_bytes: int
    fingerprint: str


class Place(Protocol):
    """Files of one kind of path. Every call may raise an `OSError`."""

    def find(self, path: str) -> Iterator[str]:
        """The files of a file's, a folder's or a pattern's path.

        Raises:
            DataError: the path does not exist, matches nothing or is not supported.
        """
        ...

    def state(self, path: str) -> State:
        """The state of a file now."""
        ...

    def stamp(self, path: str) -> Hashable:
        """Cheap to ask for: while it is the same, so is the state."""
        ...

    def open(self, path: str, num_bytes: int) -> BinaryIO:
        """A file of this size as a seekable binary file."""
        ...


def place_of(path: str, storage_options: Mapping[str, Any]) -> Place:
    """The place of a path or URL.

    Raises:
        InputError: the URL's protocol is unknown, or its package is not installed.
    """
    return RemotePlace(path, storage_options) if "://" in path else LocalPlace()


class LocalPlace:
    """A file system of this machine, or one that is mounted on it."""

    def find(self, path: str) -> Iterator[str]:
        """The files that a path names."""
        if Path(path).is_dir():
            files = (p for p in Path(path).iterdir() if p.is_file())
            return _of_folder(path, (str(p) for p in files))
        if Path(path).exists():
            return iter([_supported(path)])
        if not glob.has_magic(path):
            hint = f"; if it names a hub dataset: {SUPPORTED}" if path.count("/") == 1 else ""
            raise DataError(f"input {path} does not exist{hint}")
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - absolute patterns
        return _of_pattern(path, (p for p in matches if Path(p).is_file()))

    def state(self, path: str) -> State:
        """Size and digest of a file's ends."""
        with Path(path).open("rb") as file:
            num_bytes = file.seek(0, io.SEEK_END)

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            return State(num_bytes, digest_of_ends(read, num_bytes))

    def stamp(self, path: str) -> Hashable:
        """What the file system says of the file. Its times are compared with themselves alone."""
        found = Path(path).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def open(self, path: str, num_bytes: int) -> BinaryIO:
        """The file."""
        return Path(path).open("rb")


class RemotePlace:
    """An fsspec file system. Requests that fail are made again.

    Args:
        url: of any file there.
        storage_options: for the file system; never shown.
        retries: for its requests.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any], *, retries: Retries | None = None
    ) -> None:
        self._fs: Any = open_filesystem(url, storage_options)
        self._errors = conditions_of(url, self._fs).errors
        self._retries = retries or Retries()

    def find(self, path: str) -> Iterator[str]:
        """The files that a URL names."""
        if glob.has_magic(path) and not self._is("file", path):
            found = self._insist(path, partial(self._fs.glob, detail=True)).values()
            return _of_pattern(path, self._urls(found))
        if self._is("file", path):
            return iter([_supported(self._url(self._fs._strip_protocol(path)))])
        if not self._is("directory", path):
            raise DataError(f"input {without_credentials(path)} does not exist")
        listed = self._insist(path, partial(self._fs.ls, detail=True))
        return _of_folder(path, self._urls(listed))

    def state(self, path: str) -> State:
        """Size and ETag of an object; where there is no ETag, the digest of its ends."""
        info = self._info(path)
        etag = info.get("ETag") or info.get("etag")
        if etag:
            return State(info["size"], f"etag {str(etag).strip(chr(34))}")
        return State(info["size"], digest_of_ends(self._fetcher(path), info["size"]))

    def stamp(self, path: str) -> Hashable:
        """All that is said of the object."""
        return repr(sorted(self._info(path).items()))

    def open(self, path: str, num_bytes: int) -> BinaryIO:
        """The object, fetched in ranges as it is read."""
        return io.BufferedReader(RangeReader(self._fetcher(path), num_bytes), _READ_AHEAD_BYTES)

    def _info(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return self._insist(path, self._fs.info)

    def _is(self, kind: str, path: str) -> bool:
        try:
            return self._info(path)["type"] == kind
        except FileNotFoundError:
            return False

    def _fetcher(self, path: str) -> Callable[[int, int], bytes]:
        def fetch(start: int, end: int) -> bytes:
            return self._insist(path, partial(self._fs.cat_file, start=start, end=end))

        return fetch

    def _urls(self, entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        return (self._url(entry["name"]) for entry in entries if entry["type"] == "file")

    def _url(self, name: str) -> str:
        return self._fs.unstrip_protocol(name)

    def _insist(self, path: str, request: Callable[[str], T]) -> T:
        def one_try() -> T:
            with self._errors():
                return request(path)

        return self._retries.call(one_try, what=f"input {without_credentials(path)}")


def _of_folder(path: str, files: Iterator[str]) -> Iterator[str]:
    """The input files among a folder's; those of hidden names do not count."""
    found = sorted(file for file in files if _is_input(file))
    if not found:
        raise DataError(f"directory {without_credentials(path)} holds no input file; {SUPPORTED}")
    return iter(found)


def _of_pattern(path: str, files: Iterator[str]) -> Iterator[str]:
    found = [_supported(file) for file in files]
    if not found:
        raise DataError(f"input {without_credentials(path)} matches no file")
    return iter(found)


def name_of(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]


def _is_input(path: str) -> bool:
    name = name_of(path)
    return name.endswith(_SUFFIXES) and name[0] not in "._"


def _supported(path: str) -> str:
    if not path.endswith(_SUFFIXES):
        kind = "".join(Path(name_of(path)).suffixes[-2:]) or "unnamed"
        raise DataError(
            f"input {without_credentials(path)}: {kind} files are not supported; {SUPPORTED}"
        )
    return path


def digest_of_ends(read: Callable[[int, int], bytes], num_bytes: int) -> str:
    """Digest of a file's head and tail; the tail of a Parquet file takes in its footer.

    Args:
        read: the bytes from one place to another.
        num_bytes: the file's size.
    """
    head = read(0, min(_END_BYTES, num_bytes))
    tail = read(max(0, num_bytes - _END_BYTES), num_bytes)
    if head[:4] == tail[-4:] == b"PAR1":
        footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        if footer_bytes > len(tail):
            tail = read(max(0, num_bytes - footer_bytes), num_bytes)
    return blake2b(head + tail, digest_size=16).hexdigest()
