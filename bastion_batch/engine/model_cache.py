"""Directories that are built once per machine, whoever asks first and whatever is killed meanwhile.

<name>.lock    held while building
<name>.part    a build in progress, or what a killed one left: removed by the next
<name>/        whole: its manifest is written last, and the directory then gets its name
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bastion_batch.engine.fingerprint import fingerprint_of_file

MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where converted models and calibrations are kept: ``$BASTION_BATCH_CACHE`` or the home's."""
    configured = os.environ.get("BASTION_BATCH_CACHE")
    return Path(configured or "~/.cache/bastion_batch").expanduser().absolute()


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return `directory`, filled by `build` if it is not there whole.

    Processes that ask at the same time wait for one of them. A directory that does not match its
    manifest is built again.

    Raises:
        OSError: the directory's parent cannot be written.
    """
    if is_whole(directory):
        return directory
    with one_at_a_time(directory.with_name(f"{directory.name}.lock")):
        if not is_whole(directory):
            part = directory.with_name(f"{directory.name}.part")
            _remove(part)
            part.mkdir()
            build(part)
            _write_manifest(part)
            _sync(part)
            _remove(directory)
            part.replace(directory)
            _sync_path(directory.parent)
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a directory holds exactly what its manifest says."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return all(fingerprint_of_file(directory / n) == f for n, f in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _write_manifest(directory: Path) -> None:
    files = {path.name: fingerprint_of_file(path) for path in sorted(directory.iterdir())}
    text = json.dumps({"files": files}, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of this file; it goes with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        path.chmod(0o644)
        _sync_path(path)
    _sync_path(directory)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
