"""A described checkpoint and its target: whether they fit, and the tensors, ready to compute with.

Arithmetic is bfloat16 or float32, never float16, which overflows where the taps are fused: beside
a target in float16 a drafter is computed in bfloat16, and values are converted where they meet.
"""

from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.formats import DrafterSource
from bastion_batch.engine.target import Target
from bastion_batch.engine.transformer import StackConfig
from bastion_batch.errors import ModelError


def drafter_dtype(target_dtype: torch.dtype) -> torch.dtype:
    """The type a drafter is computed in beside such a target."""
    return torch.bfloat16 if target_dtype == torch.float16 else target_dtype


def require_fit(description: DrafterDescription, target: Target) -> None:
    """Check a drafter against the target it is to draft for.

    Raises:
        ModelError: naming the key that does not fit.
    """
    name, stack = description.name, target.stack.config
    _require_taps(description, stack.num_layers)
    if description.target_hidden_size != stack.hidden_size:
        raise ModelError(
            f"{name}: it reads taps of {description.target_hidden_size} values (hidden_size or "
            f"target_hidden_size); the target's have {stack.hidden_size}"
        )
    if description.hidden_size != stack.hidden_size and not (
        description.own_embedding and description.own_head
    ):
        raise ModelError(
            f"{name}: hidden_size {description.hidden_size} differs from the target's "
            f"{stack.hidden_size}, and it has no embedding and head of its own"
        )
    rows = description.vocab_size if description.own_embedding else target.embedding.shape[0]
    if description.mask_token_id >= rows:
        raise ModelError(
            f"{name}: mask_token_id is {description.mask_token_id}; the embedding has {rows} rows"
        )
    _require_vocabulary(description, target.ids.vocab_size)


def load_tensors(source: DrafterSource) -> dict[str, Tensor]:
    """The tensors of all files under the files' names."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(source.files.values())):
        tensors |= load_file(file)
    return tensors


def prepared(
    tensors: Mapping[str, Tensor], description: DrafterDescription, target: Target
) -> dict[str, Tensor]:
    """A file's tensors as they are computed with, under their normalised names.

    Value scales are folded into the projection of values, interleaved rotation into the order of
    the channels it rotates, and an embedding or head that is a copy of the target's is left out.
    """
    device, dtype = target.device, drafter_dtype(target.dtype)
    ready = {name: tensors[key].to(device, dtype) for key, name in description.tensor_names.items()}
    for name, own in (
        ("embed_tokens.weight", target.embedding),
        ("lm_head.weight", target.head_weight),
    ):
        if name in ready and ready[name].dtype == own.dtype and torch.equal(ready[name], own):
            del ready[name]
    for key in ready:
        if description.value_scale != 1 and ".v_proj." in key:
            ready[key] = ready[key] * description.value_scale
        if description.rope.interleaved and any(
            part in key for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")
        ):
            ready[key] = _by_halves(ready[key], description.head_dim)
    return ready


def stack_config(description: DrafterDescription) -> StackConfig:
    """The sizes of a drafter's layers."""
    return StackConfig(
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        num_q_heads=description.num_q_heads,
        num_kv_heads=description.num_kv_heads,
        head_dim=description.head_dim,
        ffn_size=description.ffn_size,
        norm_eps=description.norm_eps,
        max_positions=description.rope.max_positions,
    )


def rope_config(description: DrafterDescription) -> Qwen3Config:
    """What transformers computes a drafter's rotary frequencies from."""
    return Qwen3Config(
        hidden_size=description.hidden_size,
        num_attention_heads=description.num_q_heads,
        num_key_value_heads=description.num_kv_heads,
        head_dim=description.head_dim,
        max_position_embeddings=description.rope.max_positions,
        rope_parameters=dict(description.rope.parameters),
    )


def _by_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Channels 2i and 2i + 1 of every head moved to i and i + D / 2."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _require_taps(description: DrafterDescription, num_layers: int) -> None:
    key, shift = "target_layer_ids", 0
    if description.packaging == "speculators":
        key, shift = "aux_hidden_state_layer_ids", 1
    expected = description.num_target_layers
    if expected not in (None, num_layers):
        raise ModelError(
            f"{description.name}: num_target_layers is {expected!r}; the target has {num_layers}"
        )
    for tap in description.taps:
        if tap >= num_layers:
            raise ModelError(
                f"{description.name}: {key} holds {tap + shift}; the target's last layer is "
                f"{num_layers - 1 + shift} as it counts them"
            )


def _require_vocabulary(description: DrafterDescription, num_ids: int) -> None:
    has_rows = description.own_embedding or description.selector or description.markov
    has_rows = has_rows or (description.own_head and description.target_ids_U is None)
    if has_rows and description.vocab_size < num_ids:
        raise ModelError(
            f"{description.name}: vocab_size is {description.vocab_size}; the target has {num_ids} "
            "token ids"
        )
    ids_U = description.target_ids_U
    if ids_U is not None and ids_U.max() >= num_ids:
        raise ModelError(
            f"{description.name}: d2t gives id {ids_U.max()}; the target has {num_ids} token ids"
        )
