"""Families that are not computed here, refused by name.

Several carry the architecture name of a family that is, so that their own keys and tensors decide.
"""

from collections.abc import Callable
from typing import NamedTuple

from bastion_batch.engine.drafters.formats.source import DrafterSource
from bastion_batch.errors import ModelError

SUPPORTED = "DFlash, DFlash 2 and DSpark are supported"


class _Refused(NamedTuple):
    family: str
    found_in: Callable[[DrafterSource], str | None]
    """The key or tensor by which it is known; None where it is another family."""


def refuse_other_families(source: DrafterSource) -> None:
    """Refuse what is none of the supported families.

    Raises:
        ModelError: naming the family and the key or tensor that tells it.
    """
    for refused in _FAMILIES:
        if sign := refused.found_in(source):
            raise ModelError(
                f"{source.name}: {sign} means {refused.family}, which is not supported: {SUPPORTED}"
            )


def _kind(*kinds: str) -> Callable[[DrafterSource], str | None]:
    """By `speculators_model_type` or the algorithm of `speculators_config`."""

    def found_in(source: DrafterSource) -> str | None:
        config = source.config.get("speculators_config")
        algorithm = config.get("algorithm") if isinstance(config, dict) else None
        for key, value in (
            ("speculators_model_type", source.config.get("speculators_model_type")),
            ("speculators_config.algorithm", algorithm),
        ):
            if value in kinds:
                return f"{key} {value!r}"
        return None

    return found_in


def _architecture(*parts: str) -> Callable[[DrafterSource], str | None]:
    """By a part of an architecture's name or of `model_type`."""

    def found_in(source: DrafterSource) -> str | None:
        names = source.config.get("architectures") or []
        for key, values in (
            ("architectures", names if isinstance(names, list) else [names]),
            ("model_type", [source.config.get("model_type") or ""]),
        ):
            for value in map(str, values):
                if any(part in value.lower() for part in parts):
                    return f"{key} {value!r}"
        return None

    return found_in


def _tensor(*parts: str) -> Callable[[DrafterSource], str | None]:
    """By a part of a tensor's name."""

    def found_in(source: DrafterSource) -> str | None:
        found = (key for key in sorted(source.tensors) if any(part in key for part in parts))
        return next((f"tensor {key}" for key in found), None)

    return found_in


def _projector(*kinds: str) -> Callable[[DrafterSource], str | None]:
    """By `dflash_config.projector_type`."""

    def found_in(source: DrafterSource) -> str | None:
        nested = source.config.get("dflash_config")
        kind = nested.get("projector_type") if isinstance(nested, dict) else None
        return f"dflash_config.projector_type {kind!r}" if kind in kinds else None

    return found_in


def _gated(source: DrafterSource) -> str | None:
    """Queries that come with a gate of their own size: twice as many rows."""
    if source.config.get("enable_qwen35_gated_q_proj"):
        return "enable_qwen35_gated_q_proj"
    heads, size = (source.config.get(key) for key in ("num_attention_heads", "head_dim"))
    header = source.tensors.get("layers.0.self_attn.q_proj.weight")
    if header is None or not isinstance(heads, int) or not isinstance(size, int):
        return None
    is_gated = header.shape[0] == 2 * heads * size
    return (
        "tensor layers.0.self_attn.q_proj.weight, twice as tall as its heads," if is_gated else None
    )


def _embedded(source: DrafterSource) -> str | None:
    keys = sorted(key for key in source.config if key.startswith("dspark_"))
    return keys[0] if keys and "block_size" not in source.config else None


_FAMILIES = (
    _Refused("XPress", _kind("xpress")),
    _Refused("XPress", _architecture("xpress")),
    _Refused("XPress", _tensor("refiner_head.", "mix_l")),
    _Refused("P-EAGLE", _kind("peagle")),
    _Refused("P-EAGLE", _architecture("peagle", "p_eagle")),
    _Refused("EAGLE-3", _kind("eagle", "eagle3")),
    _Refused("EAGLE-3", _architecture("eagle")),
    _Refused("EAGLE-3", _tensor("midlayer.")),
    _Refused("MTP", _kind("mtp")),
    _Refused("MTP", _architecture("mtp")),
    _Refused("MTP", _tensor("mtp.")),
    _Refused("TiDAR", _architecture("tidar")),
    _Refused("Domino", _projector("domino")),
    _Refused("Domino", _architecture("domino")),
    _Refused("Domino", _tensor("prefix_gru.", "embed_proj.")),
    _Refused("Laguna's fused or gated DFlash", _architecture("laguna")),
    _Refused("Laguna's fused or gated DFlash", _tensor("qkv_proj", "g_proj", "aux_hidden_norms")),
    _Refused("a gated DSpark (Qwen3.5's layers, as Ornith's)", _architecture("qwen35", "qwen3_5")),
    _Refused("a gated DSpark (Qwen3.5's layers, as Ornith's)", _gated),
    _Refused("a drafter with Gemma's layers", _architecture("gemma")),
    _Refused("Muse's assistant", _tensor("encoder.fc", "output_norm_enc")),
    _Refused("MiMo's DFlash", _tensor("mask_embedding")),
    _Refused("a drafter inside a target's own checkpoint", _embedded),
)
"""In this order: the first that fits names it."""
