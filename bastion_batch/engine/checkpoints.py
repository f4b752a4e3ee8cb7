"""From a name in a job file to a directory of files that can be loaded.

A name is, in this order: a built-in target, an existing directory, a hub id (``org/name``).
Everything is checked that can be without reading weights, so that a wrong name costs a second and
not a start-up. Nothing here imports torch, and code from a checkpoint is never run.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bastion_batch.engine.builtin import (
    BUILT_IN_TARGETS,
    CONVERSION_FORMAT,
    BuiltInTarget,
    convert,
    find_gguf,
)
from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.fingerprint import fingerprint_of_files
from bastion_batch.engine.hub import fetch_config, fetch_model
from bastion_batch.engine.model_cache import build_once, cache_dir, is_whole
from bastion_batch.engine.weight_files import weight_files
from bastion_batch.errors import ModelError

__all__ = [
    "BUILT_IN_TARGETS",
    "SUPPORTED_FAMILIES",
    "ModelFiles",
    "cache_dir",
    "load_tokenizer",
    "require_supported_config",
    "resolve_drafter",
    "resolve_target",
]

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose layers the engine computes."""

DRAFTERS = Path(__file__).parent.parent / "data" / "drafters"

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that decide, with the weights, what the model says."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class ModelFiles(NamedTuple):
    """A checkpoint on this machine."""

    name: str
    """As the user gave it."""
    path: Path
    digest: str
    """Hex; equal exactly when weights, tokenizer and chat template are (weights are sampled)."""


def resolve_target(name: str, revision: str | None = None) -> ModelFiles:
    """Find a target, converting or downloading it once if need be.

    Raises:
        ModelError: naming the target and why it cannot be used.
    """
    built_in = BUILT_IN_TARGETS.get(name)
    if built_in:
        _refuse_revision(name, revision)
        return _resolve_built_in(name, built_in)
    what = f"target {name!r}"
    path = _resolve_path(what, name, revision, known=BUILT_IN_TARGETS)
    require_supported_config(_read_config(what, path), what)
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{what}: {path} has no tokenizer (one of {', '.join(_TOKENIZER_FILES)})")
    return _model_files(what, name, path)


def resolve_drafter(name: str | None, target_name: str) -> ModelFiles | None:
    """Find the drafter for a target; None without one.

    Raises:
        ModelError: naming the drafter and why it cannot be used: the key, tensor or family.
    """
    if name is None:
        return None
    if name == "default":
        return _default_drafter(target_name)
    what = f"drafter {name!r}"
    path = _resolve_path(what, name, None, known=("default",))
    describe_directory(path)
    return _model_files(what, name, path)


def load_tokenizer(path: Path) -> Any:  # noqa: ANN401 - a transformers tokenizer
    """Load the tokenizer of a checkpoint directory.

    Raises:
        ModelError: it cannot be loaded without running code from the checkpoint.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer of {path} cannot be loaded: {_one_line(error)}") from error


def require_supported_config(config: Mapping[str, Any], what: str) -> None:
    """Refuse a model that cannot be verified as a tree, from its `config.json`.

    Raises:
        ModelError: naming the family, the kind of layer or the quantisation.
    """
    family = config.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"{what} is of model_type {family!r}, whose layers the engine does not compute; "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    kinds = set(config.get("layer_types") or ())
    if config.get("use_sliding_window"):
        kinds.add("sliding_attention")
    if unsupported := sorted(kinds - {"full_attention"}):
        raise ModelError(
            f"{what} has layers of type {', '.join(unsupported)}: "
            "a tree can only be verified by full_attention layers"
        )
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown")
        raise ModelError(f"{what} is quantised ({method}); give the unquantised checkpoint")


def _resolve_built_in(name: str, target: BuiltInTarget) -> ModelFiles:
    identity = f"{target.sha256}\0{CONVERSION_FORMAT}".encode()
    digest = hashlib.blake2b(identity, digest_size=16).hexdigest()
    directory = cache_dir() / "models" / f"{name}-{digest[:12]}"
    if not is_whole(directory):
        gguf_file = find_gguf(name, target)
        try:
            build_once(directory, lambda part: convert(gguf_file, part))
        except OSError as error:
            raise ModelError(
                f"target {name!r} cannot be converted into {directory}: {_one_line(error)}; "
                "set BASTION_BATCH_CACHE to a directory with 600 MB of free space"
            ) from error
    return ModelFiles(name, directory, digest)


def _default_drafter(target_name: str) -> ModelFiles:
    built_in = BUILT_IN_TARGETS.get(target_name)
    if not built_in:
        raise ModelError(
            f"there is no built-in drafter for target {target_name!r} (there is one for "
            f"{', '.join(BUILT_IN_TARGETS)}): set model.drafter to a directory, a hub id or null"
        )
    path = DRAFTERS / built_in.drafter
    return _model_files("drafter 'default'", "default", path)


def _resolve_path(what: str, name: str, revision: str | None, known: Iterable[str]) -> Path:
    """The directory a name stands for; a hub id is downloaded."""
    path = Path(name).expanduser().absolute()
    if name and path.is_dir():
        _refuse_revision(name, revision)
        return path
    if path.is_file():
        raise ModelError(f"{what} is a file; give the directory of the checkpoint")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"{what}: there is no such directory")
    if not _HUB_ID.fullmatch(name):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ModelError(
            f"{what} is neither built in ({', '.join(known)}), nor a directory, "
            f"nor a hub id (org/name){hint}"
        )
    config = fetch_config(what, name, revision)
    if what.startswith("target"):
        require_supported_config(_read_config(what, config.parent), what)
    return fetch_model(what, name, revision, TEXT_FILES)


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision!r} was given, but {name!r} is not a hub id")


def target_vocab_size(target: ModelFiles) -> int:
    """How many token ids a resolved target has."""
    return int(_read_config("target", target.path)["vocab_size"])


def _read_config(what: str, path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{what}: {path} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{what}: {file} cannot be read: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{what}: {file} holds {type(config).__name__}, not a mapping")
    return config


def _model_files(what: str, name: str, path: Path) -> ModelFiles:
    text = [path / file for file in TEXT_FILES if (path / file).is_file()]
    return ModelFiles(name, path, fingerprint_of_files([*text, *weight_files(what, path)]))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
