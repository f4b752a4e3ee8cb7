"""Which packaging a checkpoint is.

In this order: `speculators`' own keys; families that are refused; what only DSpark has, then which
of its packagings; what only DFlash 2 has; DFlash, of which one with its own embedding and head is
DeepSpec's. Architecture names come last: three families share `DFlashDraftModel`.
"""

from collections.abc import Callable
from pathlib import Path

from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.formats import dspark, zlab
from bastion_batch.engine.drafters.formats.fields import nested_options
from bastion_batch.engine.drafters.formats.refused import SUPPORTED, refuse_other_families
from bastion_batch.engine.drafters.formats.source import DrafterSource
from bastion_batch.engine.drafters.formats.speculators import read_speculators
from bastion_batch.errors import ModelError

_Reader = Callable[[DrafterSource], DrafterDescription]


def describe_directory(path: Path) -> DrafterDescription:
    """What the checkpoint in a directory is.

    Raises:
        ModelError: naming the key, tensor, file or family that is at fault.
    """
    return describe(DrafterSource.of_directory(path))


def describe(source: DrafterSource) -> DrafterDescription:
    """What a checkpoint is.

    Raises:
        ModelError: naming the key, tensor or family that is at fault.
    """
    refuse_other_families(source)
    return _reader_of(source)(source)


def _reader_of(source: DrafterSource) -> _Reader:
    config = source.config
    if config.get("speculators_model_type") or config.get("speculators_config"):
        return read_speculators
    nested = nested_options(source.name, config, "dflash_config")
    if (kind := nested.get("projector_type")) not in (None, "dspark"):
        raise ModelError(
            f"{source.name}: dflash_config.projector_type is {kind!r}, which is not understood: "
            f"{SUPPORTED}"
        )
    architecture = _architecture(source)
    has_heads = source.has_any("markov_head.", "confidence_head.")
    if (
        kind == "dspark"
        or "DSpark" in architecture
        or (has_heads and config.get("target_layer_ids") is not None)
    ):
        return _dspark_reader(source, kind, architecture)
    if architecture == "DFlash2DraftModel" or source.has_any("candidate_selector.", "base_kernel"):
        return zlab.read_dflash2
    if "DFlash" not in architecture:
        raise ModelError(
            f"{source.name}: architectures is {config.get('architectures')!r}: {SUPPORTED}"
        )
    has_own = {"embed_tokens.weight", "lm_head.weight"} <= source.tensors.keys()
    if has_own and config.get("target_layer_ids") is not None:
        return dspark.read_deepspec
    return zlab.read_dflash


def _dspark_reader(source: DrafterSource, kind: str | None, architecture: str) -> _Reader:
    if kind == "dspark":
        return dspark.read_specforge
    if "Lfm2" in architecture:
        return dspark.read_lfm2
    if source.config.get("dflash_config"):
        return dspark.read_nemotron
    return dspark.read_deepspec


def _architecture(source: DrafterSource) -> str:
    names = source.config.get("architectures")
    return " ".join(map(str, names)) if isinstance(names, list) else ""
