"""DFlash block-diffusion drafter (arXiv 2602.06036), z-lab's checkpoint format.

One pass fills a block: slot 0 is the last committed token, the other slots are masked and predict
their own position. Every layer attends to keys and values projected from the target's taps of the
context, and to the whole block. Only those context entries are ever kept; a block's own entries
saw masks and stay scratch.

Shape letters: R rows, W block width, D = W - 1 depth, K ranks, S packed tokens, E hidden size,
T taps.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.attention import AttentionPlan, PassRow, StorePlan, pass_order
from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.target import Target
from bastion_batch.engine.transformer import (
    DecoderStack,
    Layer,
    Rotary,
    StackConfig,
    layer_tensors,
)
from bastion_batch.errors import ModelError

PIECE_ROWS = 8
"""Slots whose logits are reduced together: a piece in float32 stays in a processor's cache."""

NUM_RANKS = 64
"""K: candidates kept per position. A tree of 512 nodes seldom asks for more at one position."""


class DFlashDrafter:
    """A DFlash checkpoint bound to its target, whose embedding and head it uses."""

    def __init__(
        self,
        target: Target,
        stack: DecoderStack,
        fuse: Linear,
        fuse_norm: Tensor,
        *,
        block_size: int,
        mask_token_id: int,
        taps: tuple[int, ...],
    ) -> None:
        self.depth = block_size - 1
        self.taps = taps
        self._target = target
        self._stack = stack
        self._fuse = fuse
        self._fuse_norm = fuse_norm
        self._mask_token_id = mask_token_id
        config = stack.config
        self._cache = KVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, target.dtype, target.device
        )
        self._slots: dict[int, Slot] = {}

    @classmethod
    def load(cls, path: Path, target: Target) -> "DFlashDrafter":
        """Load a checkpoint directory for a target.

        Raises:
            ModelError: a key or tensor is missing, unknown, or does not fit the target.
        """
        config = _read_config(path)
        options = _block_options(path, config, target)
        try:
            tensors = load_file(path / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"drafter {path}: model.safetensors cannot be read: {error}") from None
        return cls.of_tensors(config, tensors, target, **options, name=str(path))

    @classmethod
    def of_tensors(
        cls,
        config: Any,  # noqa: ANN401 - a transformers config
        tensors: dict[str, Tensor],
        target: Target,
        *,
        block_size: int,
        mask_token_id: int,
        taps: tuple[int, ...],
        name: str = "drafter",
    ) -> "DFlashDrafter":
        """Build from tensors under their checkpoint names (cast to the target's dtype)."""
        stack_config = StackConfig.of(config)
        _require_tensors(name, tensors, stack_config, target, len(taps))
        dtype, device = target.dtype, target.device
        tensors = {key: value.to(device, dtype) for key, value in tensors.items()}
        layers = [
            Layer.of(layer_tensors(tensors, f"layers.{number}."), stack_config)
            for number in range(stack_config.num_layers)
        ]
        rotary = Rotary(config, dtype, device)
        return cls(
            target,
            DecoderStack(stack_config, layers, tensors["norm.weight"], rotary),
            Linear(tensors["fc.weight"]),
            tensors["hidden_norm.weight"],
            block_size=block_size,
            mask_token_id=mask_token_id,
            taps=taps,
        )

    @property
    def shape(self) -> ModelShape:
        """What a draft pass costs."""
        return self._stack.config.shape(self._target.head.out_features, self._target.dtype)

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of one context token in the drafter's cache."""
        return self._cache.bytes_per_token

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Project the taps of new context tokens into every layer's keys and values."""
        width = self.depth + 1
        for key, count in zip(keys, counts, strict=True):
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = self._cache.open(count + width)
            self._cache.reserve(slot, count + width)
        slots = [self._slots[key] for key in keys]
        starts = [slot.length for slot in slots]
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        )
        plan = StorePlan(self._cache, slots, counts)
        fused = self._fuse(features_SF)
        fused = F.rms_norm(fused, fused.shape[-1:], self._fuse_norm, self._stack.config.norm_eps)
        device = self._target.device
        at = torch.from_numpy(positions).to(device)
        cos, sin = self._stack.rotary.at(at, int(positions.max()))
        for number, layer in enumerate(self._stack.layers):
            _, keys_values = self._stack.project(layer, fused, cos, sin)
            plan.store(number, keys_values)
        for slot, count in zip(slots, counts, strict=True):
            slot.length += count

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One pass over all rows' blocks, every row at its own context length."""
        width = self.depth + 1
        order = pass_order([self._slots[row.key] for row in rows], [False] * len(rows))
        slots = [self._slots[rows[place].key] for place in order]
        for place, slot in zip(order, slots, strict=True):
            assert slot.length == len(rows[place].token_ids) - 1, "the drafter lags its row"
        visible = np.ones((width, width), np.bool_)
        plan = AttentionPlan(
            self._cache,
            [PassRow(slot, width, visible) for slot in slots],
            self._stack.config.num_q_heads,
        )
        blocks = np.full((len(rows), width), self._mask_token_id)
        blocks[:, 0] = [rows[place].token_ids[-1] for place in order]
        positions = np.array([slot.length for slot in slots])[:, None] + np.arange(width)
        device = self._target.device
        hidden = F.embedding(torch.from_numpy(blocks.ravel()).to(device), self._target.embedding)
        at = torch.from_numpy(positions.ravel()).to(device)
        out = self._stack.forward(hidden, at, int(positions.max()), plan).hidden_SE
        masked = out.unflatten(0, (len(rows), width))[:, 1:].flatten(0, 1)
        return self._best(masked, order)

    def forget(self, key: int) -> None:
        """Close the row's slot."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._cache.close(slot)

    def _best(self, hidden_SE: Tensor, order: list[int]) -> Marginals:
        """The K best tokens of every masked slot, back in the caller's order of rows."""
        logits = self._target.logits(hidden_SE)
        pieces = [self._best_of(piece) for piece in logits.split(PIECE_ROWS)]
        log_probs = torch.cat([piece[0] for piece in pieces])
        token_ids = torch.cat([piece[1] for piece in pieces])
        shape = (len(order), self.depth, -1)
        back = np.argsort(order)
        return Marginals(
            log_probs.cpu().numpy().reshape(shape)[back],
            token_ids.cpu().numpy().reshape(shape)[back],
        )

    def _best_of(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the K best tokens of a few slots."""
        logits = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32), copy=True)
        if self._mask_token_id < logits.shape[-1]:
            logits[:, self._mask_token_id] = -torch.inf
        best = logits.topk(min(NUM_RANKS, logits.shape[-1]), -1)
        normaliser = logits.logsumexp(-1, keepdim=True)
        return (best.values - normaliser).clamp_(max=0.0), best.indices


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


def _read_config(path: Path) -> Any:  # noqa: ANN401 - a transformers config
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


def _block_options(path: Path, config: Any, target: Target) -> dict[str, Any]:  # noqa: ANN401
    """Block size, mask id and taps, each mandatory and in range."""
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


def _require_tensors(
    name: str, tensors: dict[str, Tensor], config: StackConfig, target: Target, num_taps: int
) -> None:
    """Every tensor of the format is there, in its shape, and no other."""
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
