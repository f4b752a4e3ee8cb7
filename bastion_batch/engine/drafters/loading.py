"""From a checkpoint directory to a drafter bound to its target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.dflash2 import DFlash2Drafter
from bastion_batch.engine.drafters.dflash_files import load_tensors, prepared, require_fit
from bastion_batch.engine.drafters.dspark import DSparkDrafter
from bastion_batch.engine.drafters.formats import DrafterSource, describe
from bastion_batch.engine.huge_pages import move_to_huge_pages
from bastion_batch.engine.target import Target


def load_drafter(path: Path, target: Target) -> DFlashDrafter:
    """Load a checkpoint directory for a target.

    Raises:
        ModelError: naming the key, tensor, file or family that is missing, unknown or does not fit.
    """
    source = DrafterSource.of_directory(path)
    description = _fitting(source, target)
    drafter = _computing(description, load_tensors(source), target)
    move_to_huge_pages(drafter)
    return drafter


def drafter_of_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target
) -> DFlashDrafter:
    """A drafter from what its checkpoint directory would hold: `config.json` and the weights.

    Raises:
        ModelError: as `load_drafter`.
    """
    description = _fitting(DrafterSource.of_tensors("drafter", config, tensors), target)
    return _computing(description, tensors, target)


def _fitting(source: DrafterSource, target: Target) -> DrafterDescription:
    description = describe(source)
    require_fit(description, target)
    return description


def _computing(
    description: DrafterDescription, tensors: Mapping[str, Tensor], target: Target
) -> DFlashDrafter:
    ready = prepared(tensors, description, target)
    return drafter_class(description)(description, ready, target)


def drafter_class(description: DrafterDescription) -> type[DFlashDrafter]:
    """What computes such a checkpoint."""
    if description.selector is not None:
        return DFlash2Drafter
    return DFlashDrafter if description.markov is None else DSparkDrafter
