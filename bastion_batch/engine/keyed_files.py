"""Small JSON files that are kept from one run to the next, one per key, in the profiles directory.

The key holds everything that the content depends on; it stands in the file in clear, and its digest
is the file's name. A file appears whole or not at all, so that any number of processes may read
and write. Nothing here imports torch.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bastion_batch.engine.model_cache import cache_dir

_OURS = re.compile(r"([a-z]+-)?[0-9a-f]{32}\.([^.]+\.part|json)")
"""Files of a key, whole and in part."""

MAX_FILES = 64
"""Files kept; the longest unused go first."""


def profiles_dir() -> Path:
    """Where such files are: ``$BASTION_BATCH_PROFILES`` or `profiles` in the cache directory."""
    configured = os.environ.get("BASTION_BATCH_PROFILES")
    return Path(configured).expanduser().absolute() if configured else cache_dir() / "profiles"


def file_of(directory: Path, key: Mapping[str, object], prefix: str = "") -> Path:
    """The file of a key, which need not exist."""
    return directory / f"{prefix}{file_name(key)}"


def file_name(key: Mapping[str, object]) -> str:
    """What the file of a key is called."""
    text = json.dumps(dict(key), sort_keys=True)
    return f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def put(path: Path, text: str) -> None:
    """Write a file, in place of an older one.

    Raises:
        OSError: it cannot be written; the older one is still there.
    """
    part = _write_part(path, text)
    try:
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _drop_oldest(path.parent)


def put_if_absent(path: Path, text: str) -> bool:
    """Write a file unless there is one of that name, and say whether it was written.

    Raises:
        OSError: it cannot be written.
    """
    part = _write_part(path, text)
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    _drop_oldest(path.parent)
    return True


def _write_part(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return part


def _drop_oldest(directory: Path) -> None:
    """Keep the most recently used files, parts that a killed process left counted too.

    Locks stay: who waits for one and who finds none there would hold two. So does whatever else
    lies in the directory, which may be one that the user named.
    """
    ages = []
    for path in directory.iterdir():
        if not _OURS.fullmatch(path.name):
            continue
        try:
            ages.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process was faster
            continue
    for _, path in sorted(ages, reverse=True)[MAX_FILES:]:
        path.unlink(missing_ok=True)
