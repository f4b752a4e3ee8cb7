"""Input files: finding them, and knowing them again.

Files are found from paths, directories and globs, and sorted by path: a file's position in that
order is its number in every `row_id`. A file is known again by its size and a digest of its head
and tail, wherever it lies.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bastion_batch.errors import DataError

_SUFFIXES = (".jsonl", ".parquet")
_SUPPORTED = "plain JSONL and Parquet files (.jsonl, .parquet) are supported now"
_END_BYTES = 1 << 16


class InputFile(NamedTuple):
    """One input file, and what it must still be when a worker opens it."""

    path: str
    name: str
    num_bytes: int
    fingerprint: str

    @property
    def is_parquet(self) -> bool:
        """Whether it is Parquet; else JSONL."""
        return self.name.endswith(".parquet")

    @property
    def identity(self) -> str:
        """The file without its place."""
        return f"{self.name}, {self.num_bytes} bytes, {self.fingerprint}"


def find_paths(paths: Iterable[str]) -> list[str]:
    """The files that the paths name, sorted, each once.

    Raises:
        DataError: naming a path that does not exist, matches nothing or is not supported.
    """
    found: dict[str, str] = {}
    for path in paths:
        try:
            found.update({os.path.abspath(file): file for file in _expand(path)})  # noqa: PTH100
        except OSError as error:
            raise DataError(f"input {path} cannot be read: {error.strerror}") from None
    return [found[path] for path in sorted(found)]


def find_inputs(paths: Iterable[str]) -> tuple[InputFile, ...]:
    """The input files that the paths name, as they are now.

    Raises:
        DataError: as `find_paths`, or naming a file that cannot be read.
    """
    files = tuple(_describe(path) for path in find_paths(paths))
    if len({file.is_parquet for file in files}) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise DataError(f"inputs mix JSONL and Parquet files ({names}); give one kind")
    return files


def _expand(path: str) -> Iterator[str]:
    if "://" in path:
        raise DataError(f"input {path} is not a local path; {_SUPPORTED}")
    if Path(path).is_dir():
        files = sorted(str(p) for p in Path(path).iterdir() if _is_input(p))
        if not files:
            raise DataError(f"directory {path} holds no input file; {_SUPPORTED}")
        yield from files
    elif Path(path).exists():
        yield _supported(path)
    elif glob.has_magic(path):
        matches = [p for p in sorted(glob.glob(path, recursive=True)) if Path(p).is_file()]  # noqa: PTH207 - absolute patterns
        if not matches:
            raise DataError(f"input {path} matches no file")
        yield from (_supported(p) for p in matches)
    else:
        hint = f"; if it names a hub dataset: {_SUPPORTED}" if path.count("/") == 1 else ""
        raise DataError(f"input {path} does not exist{hint}")


def _is_input(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file() and path.name[0] not in "._"


def _supported(path: str) -> str:
    if Path(path).suffix not in _SUFFIXES:
        kind = "".join(Path(path).suffixes[-2:]) or "unnamed"
        raise DataError(f"input {path}: {kind} files are not supported; {_SUPPORTED}")
    return path


def _describe(path: str) -> InputFile:
    try:
        with Path(path).open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return InputFile(path, Path(path).name, num_bytes, _fingerprint(file, num_bytes))
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error.strerror}") from None


def _fingerprint(file: BinaryIO, num_bytes: int) -> str:
    """Digest of the file's head and tail; the tail of a Parquet file takes in its footer."""
    digest = blake2b(digest_size=16)
    file.seek(0)
    head = file.read(_END_BYTES)
    tail_bytes = _END_BYTES
    file.seek(max(0, num_bytes - 8))
    end = file.read(8)
    if head[:4] == end[4:] == b"PAR1":
        tail_bytes = max(tail_bytes, int.from_bytes(end[:4], "little") + 8)
    file.seek(max(0, num_bytes - tail_bytes))
    digest.update(head)
    digest.update(file.read(tail_bytes))
    file.seek(0)
    return digest.hexdigest()


def open_input(file: InputFile) -> BinaryIO:
    """Open a file that is still the one that was planned.

    Raises:
        DataError: naming a file that is gone or has changed.
    """
    try:
        opened = Path(file.path).open("rb")  # noqa: SIM115 - the caller's
    except OSError as error:
        raise DataError(f"input {file.path} cannot be read: {error.strerror}") from None
    num_bytes = os.fstat(opened.fileno()).st_size
    if num_bytes == file.num_bytes and _fingerprint(opened, num_bytes) == file.fingerprint:
        return opened
    opened.close()
    raise DataError(
        f"input {file.path} has changed since the job was planned"
        f" ({file.num_bytes} bytes then, {num_bytes} now)"
    )
