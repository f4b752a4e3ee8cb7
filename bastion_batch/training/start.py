"""Where a drafter's first weights come from: the target's last layers, or another drafter.

The tap fusion of a fresh drafter begins as the mean of the taps: what the layers then see in place
of their own context is close to what they saw in the target.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bastion_batch.engine.drafters.dflash_files import load_tensors
from bastion_batch.engine.drafters.formats import DrafterSource, describe
from bastion_batch.engine.transformer import layer_tensors
from bastion_batch.errors import ModelError
from bastion_batch.training.model import DrafterModel

INITIAL_NOISE = 0.02


def load_target_layers(model: DrafterModel, target: Path, seed: int) -> None:
    """Begin with the target's last layers and its final norm.

    Heads that the target does not normalise begin with norms of one, and what it adds no bias to
    with biases of zero. The drafter has at most as many layers.

    Raises:
        ModelError: the target's files do not hold them, or in other sizes.
    """
    shape = model.shape
    first = shape.num_target_layers - shape.num_layers
    wanted = {"norm.weight": "model.norm.weight"}
    for number in range(shape.num_layers):
        for name in layer_tensors(model.state_dict(), f"layers.{number}."):
            wanted[f"layers.{number}.{name}"] = f"model.layers.{first + number}.{name}"
    found = _read(target, set(wanted.values()))
    tensors = {name: found[source] for name, source in wanted.items() if source in found}
    tensors["fc.weight"] = _mean_of_taps(len(shape.taps), shape.hidden_size, seed)
    left = model.state_dict().keys() - tensors.keys()
    absent = sorted(name for name in left if not name.endswith(("norm.weight", ".bias")))
    if absent:
        raise ModelError(f"target {target} has no {', '.join(wanted[n] for n in absent)}")
    _load(model, tensors, str(target), strict=False)


def load_drafter_weights(model: DrafterModel, drafter: Path) -> None:
    """Begin with the weights of an existing drafter.

    Raises:
        ModelError: it has other sizes, or cannot be read.
    """
    source = DrafterSource.of_directory(drafter)
    tensors = load_tensors(source)
    named = {name: tensors[key] for key, name in describe(source).tensor_names.items()}
    _load(model, named, str(drafter), strict=True)


def randomise(model: DrafterModel, seed: int) -> None:
    """Begin with random weights, for drafters whose layers are not like the target's."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=INITIAL_NOISE, generator=generator)


def _load(model: DrafterModel, tensors: Mapping[str, Tensor], name: str, *, strict: bool) -> None:
    own = model.state_dict()
    for key, value in tensors.items():
        if key in own and own[key].shape != value.shape:
            raise ModelError(
                f"{name}: {key} is {list(value.shape)}, the drafter's is {list(own[key].shape)}"
            )
    values = {key: value.float() for key, value in tensors.items()}
    model.load_state_dict(values, strict=strict)


def _mean_of_taps(num_taps: int, hidden_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(hidden_size, num_taps * hidden_size, generator=generator)
    scale = INITIAL_NOISE * (num_taps * hidden_size) ** -0.5
    return torch.eye(hidden_size).repeat(1, num_taps) / num_taps + scale * noise


def _read(directory: Path, names: set[str]) -> dict[str, Tensor]:
    """Those of the tensors that the directory's files hold."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in names.intersection(file.keys()):
                found[name] = file.get_tensor(name)
    return found
