"""What a drafter checkpoint says before its weights are read: configuration and tensor headers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from bastion_batch.engine.weight_files import weight_files
from bastion_batch.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

FLOAT_TYPES = frozenset({"F32", "BF16", "F64"})
"""Types of weights that are computed with, as safetensors names them."""

_TYPES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float64": "F64",
    "torch.float16": "F16",
}

CONFIG_FILE = "config.json"


class TensorHeader(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSource:
    """A checkpoint that has not been understood yet."""

    name: str
    """What messages call it, "drafter ..."."""
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    files: Mapping[str, Path] = field(default_factory=dict)
    """The file of every tensor, where it comes from files."""
    integers: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Tensors of whole numbers or truth values, which belong to the description."""

    @classmethod
    def of_directory(cls, path: Path) -> "DrafterSource":
        """Read a checkpoint directory; the weights stay where they are.

        Raises:
            ModelError: naming the file that is missing or cannot be read.
        """
        name = f"drafter {path}"
        config = _read_json(name, path / CONFIG_FILE)
        tensors: dict[str, TensorHeader] = {}
        files: dict[str, Path] = {}
        integers: dict[str, NDArray[np.int64]] = {}
        for file in weight_files(name, path):
            try:
                with safe_open(file, framework="numpy") as opened:
                    for key in opened.keys():  # noqa: SIM118 - not a mapping
                        part = opened.get_slice(key)
                        tensors[key] = TensorHeader(tuple(part.get_shape()), part.get_dtype())
                        files[key] = file
                        if part.get_dtype() in ("BOOL", "I32", "I64"):
                            integers[key] = opened.get_tensor(key).astype(np.int64)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{name}: {file.name} cannot be read: {error}") from None
        return cls(name=name, config=config, tensors=tensors, files=files, integers=integers)

    @classmethod
    def of_tensors(
        cls, name: str, config: Mapping[str, Any], tensors: Mapping[str, "Tensor"]
    ) -> "DrafterSource":
        """What is in memory, as if it came from files."""
        return cls(
            name=name,
            config=config,
            tensors={
                key: TensorHeader(
                    tuple(value.shape), _TYPES.get(str(value.dtype), str(value.dtype))
                )
                for key, value in tensors.items()
            },
            integers={
                key: value.cpu().numpy().astype(np.int64)
                for key, value in tensors.items()
                if not value.is_floating_point()
            },
        )

    def has_any(self, *parts: str) -> bool:
        """Whether a tensor's name contains one of some parts."""
        return any(part in key for key in self.tensors for part in parts)


def _read_json(name: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name}: {file.name} holds {type(value).__name__}, not an object")
    return value
