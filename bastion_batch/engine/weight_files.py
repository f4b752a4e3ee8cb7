"""Where the weights of a checkpoint directory are. Nothing here imports torch."""

import json
from pathlib import Path

from bastion_batch.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(what: str, path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names.

    Args:
        what: what messages call the model.
        path: the checkpoint's directory.

    Raises:
        ModelError: there are none, the index cannot be read, or a file that it names is missing.
    """
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"{what}: {path} has no weights as safetensors ({SINGLE_FILE} or {INDEX_FILE})"
            f"{_other_weights(path)}"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{what}: {index} cannot be read: {error!r}") from None
    if not names:
        raise ModelError(f"{what}: {index} names no files")
    if missing := [file for file in names if not (path / file).is_file()]:
        raise ModelError(f"{what}: {path} lacks {', '.join(missing)}, which its index names")
    return [path / file for file in names]


def _other_weights(path: Path) -> str:
    """Weights in formats that are not read, for the message."""
    files = path.iterdir() if path.is_dir() else ()
    others = sorted(file.name for file in files if file.suffix in (".bin", ".pt", ".gguf"))
    return f"; GGUF or pickled weights as {', '.join(others)} cannot be used" if others else ""
