"""What identifies a checkpoint's files without reading gigabytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16

VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "_commit_hash")
"""They say who wrote `config.json`, not what the model is."""


def fingerprint_of_file(path: Path) -> str:
    """Hex digest of one file: whole, but of safetensors the size and evenly spaced samples.

    The samples include the head, where the tensors' names, shapes and dtypes are, and the tail.
    """
    digest = hashlib.blake2b(digest_size=16)
    if path.suffix != ".safetensors":
        digest.update(_stable_bytes(path))
        return digest.hexdigest()
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for number in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint_of_files(paths: Iterable[Path]) -> str:
    """Hex digest of files by their names and fingerprints, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths, key=lambda p: p.name):
        digest.update(f"{path.name}\0{fingerprint_of_file(path)}\n".encode())
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stable_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    if path.name != "config.json":
        return content
    config = json.loads(content)
    kept = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    return json.dumps(kept, sort_keys=True).encode()
