"""Input files: finding them, and knowing them again.

Files are found from paths, directories, globs and URLs, and sorted by path: a file's position in
that order is its number in every `row_id`. At every open, and after every piece that is read, a
file must still be the planned one: nothing of a file that changed in mid-run reaches an output.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

from bastion_batch.errors import DataError, InputError
from bastion_batch.io.filesystems import without_credentials
from bastion_batch.io.places import State, name_of, place_of

T = TypeVar("T")

_NUM_CONNECTIONS = 32


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


def find_paths(paths: Iterable[str], storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files that the paths name, sorted, each once.

    Raises:
        DataError: naming a path that does not exist, matches nothing or is not supported.
    """
    found: dict[str, str] = {}
    for path in paths:
        with readable(path):
            files = place_of(path, storage_options or {}).find(path)
            found.update({_absolute(file): file for file in files})
    return [found[path] for path in sorted(found)]


def find_inputs(
    paths: Iterable[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[InputFile, ...]:
    """The input files that the paths name, as they are now.

    Raises:
        DataError: as `find_paths`, or naming a file that cannot be read.
    """
    found = find_paths(paths, storage_options)
    files = tuple(at_once(partial(_describe, storage_options=storage_options or {}), found))
    if len({file.is_parquet for file in files}) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise DataError(f"inputs mix JSONL and Parquet files ({names}); give one kind")
    return files


def at_once(function: Callable[..., T], items: Sequence[Any]) -> Iterator[T]:
    """The function's results in order; some calls wait for storage while others compute."""
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        yield from pool.map(function, items)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """A context in which errors of storage become `DataError`s that name the input."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"input {without_credentials(path)} cannot be read: {error.strerror or error}"
        ) from None
    except InputError as error:
        raise error if isinstance(error, DataError) else DataError(f"input {error}") from None


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - links stay


def _describe(path: str, storage_options: Mapping[str, Any]) -> InputFile:
    with readable(path):
        return InputFile(path, name_of(path), *place_of(path, storage_options).state(path))


class OpenInput:
    """A planned file, open. A context manager.

    Args:
        planned: the file.
        storage_options: for its file system, where its path is a URL.

    Raises:
        DataError: it is gone or has changed.
        OSError: storage does not answer.
    """

    file: BinaryIO

    def __init__(self, planned: InputFile, storage_options: Mapping[str, Any]) -> None:
        self._planned = planned
        self._place = place_of(planned.path, storage_options)
        with self._present():
            self._stamp = self._place.stamp(planned.path)
            self._require_planned()
            self.file = self._place.open(planned.path, planned.num_bytes)

    def require_unchanged(self) -> None:
        """Check that what was read until now came from the planned file.

        Raises:
            DataError: the file is gone, or has changed since it was opened.
            OSError: storage does not answer.
        """
        with self._present():
            stamp = self._place.stamp(self._planned.path)
            if stamp != self._stamp:
                self._require_planned()
                self._stamp = stamp

    def _require_planned(self) -> None:
        planned = State(self._planned.num_bytes, self._planned.fingerprint)
        found = self._place.state(self._planned.path)
        if found != planned:
            raise DataError(
                f"input {without_credentials(self._planned.path)} has changed since the job was"
                f" planned: {_shown(planned)} then, {_shown(found)} now"
            )

    @contextmanager
    def _present(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            with readable(self._planned.path):
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_input(planned: InputFile, storage_options: Mapping[str, Any] | None = None) -> OpenInput:
    """Open a file that is still the one that was planned: see `OpenInput`."""
    return OpenInput(planned, storage_options or {})


def _shown(state: State) -> str:
    return f"{state.num_bytes} bytes, fingerprint {state.fingerprint}"
