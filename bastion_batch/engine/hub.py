"""Checkpoints from the Hugging Face hub: only the files that are used.

One process of a machine downloads a repository at a time; the others wait and find it there.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bastion_batch.engine.model_cache import one_at_a_time
from bastion_batch.errors import ModelError


def fetch_config(what: str, repo_id: str, revision: str | None) -> Path:
    """The path of a repository's `config.json`, so that it can be judged before any download.

    Raises:
        ModelError: it cannot be fetched.
    """
    path = _snapshot(what, repo_id, revision, ["config.json"]) / "config.json"
    if not path.is_file():
        raise ModelError(f"{what}: the hub repository {repo_id} has no config.json")
    return path


def fetch_model(what: str, repo_id: str, revision: str | None, text_files: Sequence[str]) -> Path:
    """The snapshot directory of a repository, with its safetensors and the given text files.

    Raises:
        ModelError: it cannot be fetched.
    """
    weights = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
    return _snapshot(what, repo_id, revision, [*text_files, *weights])


def _snapshot(what: str, repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with one_at_a_time(_lock_of(repo_id)):
            return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{what} is no directory here, and the hub repository {repo_id}{at} cannot be "
            f"fetched: {cause}"
        ) from None


def _lock_of(repo_id: str) -> Path:
    """Of this machine and user: the cache may be one that cannot be written, or is shared."""
    name = hashlib.blake2b(repo_id.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"bastion_batch-{os.getuid()}", f"{name}.lock")
