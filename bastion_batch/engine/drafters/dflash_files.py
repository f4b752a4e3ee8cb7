"""What a DFlash checkpoint directory says: its options and tensors, checked against the target."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from bastion_batch.engine.target import Target
from bastion_batch.engine.transformer import StackConfig
from bastion_batch.errors import ModelError

KNOWN_OPTIONS = frozenset(
    {"target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers"}
)
"""Keys of `dflash_config` that are understood; another one that is set changes the model."""

REFUSED_OPTIONS = (
    "projector_type",
    "causal_head",
    "is_causal",
    "attention_sink_bias",
    "attention_value_scale",
    "final_logit_softcapping",
    "input_embedding_scale",
    "output_multiplier",
    "draft_vocab_size",
)
"""Keys of the whole configuration that make another model of it than the one computed here."""


def read_config(path: Path) -> Any:  # noqa: ANN401 - a transformers config
    """The configuration of a checkpoint directory.

    Raises:
        ModelError: it cannot be read, or asks for another model than the one computed here.
    """
    from transformers import Qwen3Config

    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"drafter {path}: config.json cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"drafter {path}: config.json holds {type(raw).__name__}, not an object")
    if raw.get("architectures") != ["DFlashDraftModel"]:
        raise ModelError(
            f"drafter {path}: architectures {raw.get('architectures')} is not supported: "
            "['DFlashDraftModel'] is"
        )
    nested = raw.get("dflash_config") or {}
    refused = [key for key in REFUSED_OPTIONS if raw.get(key) or nested.get(key)]
    refused += [key for key in sorted(nested.keys() - KNOWN_OPTIONS) if nested[key]]
    refused += [
        key
        for key in ("is_neox_style", "rope_is_neox_style")
        if False in (raw.get(key), nested.get(key))
    ]
    if refused:
        raise ModelError(
            f"drafter {path}: {', '.join(dict.fromkeys(refused))} is not supported by this version"
        )
    raw.pop("architectures")
    return Qwen3Config.from_dict(raw)


def block_options(path: Path, config: Any, target: Target) -> dict[str, Any]:  # noqa: ANN401
    """Block size, mask id and taps, each mandatory and in range.

    Raises:
        ModelError: naming the option that is missing or out of range.
    """
    nested = getattr(config, "dflash_config", None) or {}
    num_layers = target.stack.config.num_layers
    expected = nested.get("num_target_layers", getattr(config, "num_target_layers", None))
    if expected not in (None, num_layers):
        raise ModelError(
            f"drafter {path}: num_target_layers is {expected}; the target has {num_layers}"
        )
    taps = nested.get("target_layer_ids")
    if not taps or not isinstance(taps, list):
        raise ModelError(f"drafter {path}: dflash_config.target_layer_ids is missing")
    for tap in taps:
        if not isinstance(tap, int) or not 0 <= tap < num_layers:
            raise ModelError(
                f"drafter {path}: dflash_config.target_layer_ids holds {tap!r}; "
                f"the target's layers are 0 to {num_layers - 1}"
            )
    mask = nested.get("mask_token_id", getattr(config, "mask_token_id", None))
    num_rows = target.embedding.shape[0]
    if not isinstance(mask, int) or not 0 <= mask < num_rows:
        raise ModelError(
            f"drafter {path}: mask_token_id is {mask!r}; the target's embedding has {num_rows} rows"
        )
    block_size = nested.get("block_size", getattr(config, "block_size", 16))
    if not isinstance(block_size, int) or block_size < 2:
        raise ModelError(f"drafter {path}: block_size is {block_size!r}; at least 2 is needed")
    return {"block_size": block_size, "mask_token_id": mask, "taps": tuple(taps)}


def require_tensors(
    name: str, tensors: dict[str, Tensor], config: StackConfig, target: Target, num_taps: int
) -> None:
    """Check that every tensor of the format is there, in its shape, and no other.

    Raises:
        ModelError: naming those that are not.
    """
    expected = _expected_shapes(config, num_taps * target.stack.config.hidden_size)
    if config.hidden_size != target.stack.config.hidden_size:
        raise ModelError(
            f"{name}: hidden_size {config.hidden_size} differs from the target's "
            f"{target.stack.config.hidden_size}"
        )
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise ModelError(f"{name}: missing tensors {missing}, unclaimed tensors {unknown}")
    for key, shape in expected.items():
        if tuple(tensors[key].shape) != shape:
            raise ModelError(f"{name}: {key} is {tuple(tensors[key].shape)}, expected {shape}")


def _expected_shapes(config: StackConfig, feature_size: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head = config.hidden_size, config.ffn_size, config.head_dim
    queries, keys = config.num_q_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    model: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layers = {
        f"layers.{number}.{key}": shape
        for number in range(config.num_layers)
        for key, shape in layer.items()
    }
    return model | layers
