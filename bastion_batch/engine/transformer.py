"""The decoder stack that target and drafter share: Llama, Qwen2 and Qwen3 layers, packed.

Shape letters: S tokens of the pass, E hidden size, H query heads, G key-value heads, D head size,
P positions, T taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine import kernels
from bastion_batch.engine.attention import Attends
from bastion_batch.engine.linear import GatedLinear, Linear
from bastion_batch.errors import ModelError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The sizes of a stack."""

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_positions: int

    @classmethod
    def of(cls, config: Any) -> "StackConfig":  # noqa: ANN401 - any transformers config
        """Read a transformers configuration.

        Raises:
            ModelError: something in it is not supported; the message names it.
        """
        name = getattr(config, "model_type", "?")
        if config.hidden_act != "silu":
            raise ModelError(f"{name}: hidden_act {config.hidden_act!r} is not supported: silu is")
        for kind in getattr(config, "layer_types", None) or ():
            if kind != "full_attention":
                raise ModelError(
                    f"{name}: layers of type {kind!r} cannot be verified as a tree here: "
                    "full_attention can"
                )
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_q_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            ffn_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
        )

    def shape(self, vocab_size: int, dtype: torch.dtype) -> ModelShape:
        """What a pass through the stack and a head costs."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            vocab_size=vocab_size,
            bytes_per_value=dtype.itemsize,
        )


class Layer(NamedTuple):
    """The weights of one layer, projections of the same input fused."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """`[H + G, D]`, or None where heads are not normalised."""
    output: Linear
    post_norm: Tensor
    gate_up: GatedLinear
    down: Linear

    @classmethod
    def of(cls, weights: dict[str, Tensor], config: StackConfig) -> "Layer":
        """From a layer's tensors under their transformers names, without the layer's prefix."""

        def fused(*names: str) -> Linear:
            weight = torch.cat([weights[f"{name}.weight"] for name in names])
            biases = [weights[f"{n}.bias"] for n in names if f"{n}.bias" in weights]
            return Linear(weight, torch.cat(biases) if biases else None)

        qk_norm = None
        if "self_attn.q_norm.weight" in weights:
            q = weights["self_attn.q_norm.weight"].expand(config.num_q_heads, -1)
            k = weights["self_attn.k_norm.weight"].expand(config.num_kv_heads, -1)
            qk_norm = torch.cat([q, k]).contiguous()
        return cls(
            input_norm=weights["input_layernorm.weight"],
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norm=qk_norm,
            output=fused("self_attn.o_proj"),
            post_norm=weights["post_attention_layernorm.weight"],
            gate_up=GatedLinear(
                weights["mlp.gate_proj.weight"],
                weights["mlp.up_proj.weight"],
                weights.get("mlp.gate_proj.bias"),
                weights.get("mlp.up_proj.bias"),
            ),
            down=fused("mlp.down_proj"),
        )


class Rotary:
    """Rotary position embedding from a table that grows with the positions seen."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - any transformers config
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind not in SUPPORTED_ROPE:
            supported = ", ".join(SUPPORTED_ROPE)
            raise ModelError(f"rope_type {kind!r} is not supported; these are: {supported}")
        rotary = LlamaRotaryEmbedding(config=config)
        self._frequencies = rotary.inv_freq.to(device=device, dtype=torch.float32)
        self._scale = rotary.attention_scaling
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, device=device)

    def at(self, positions_S: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `[S, 1, D]` of positions up to `max_position`."""
        if max_position >= len(self._cos):
            self._grow(max(1024, 2 * max_position))
        return self._cos[positions_S][:, None], self._sin[positions_S][:, None]

    def _grow(self, num_positions: int) -> None:
        device = self._frequencies.device
        angles = torch.arange(num_positions, device=device).float()[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos = torch.cat([cos, cos], -1).to(self._dtype)
        self._sin = torch.cat([-sin, sin], -1).to(self._dtype)


class StackOutput(NamedTuple):
    """What a pass leaves."""

    hidden_SE: Tensor
    """After the final norm; of the wanted tokens."""
    taps_SF: Tensor | None
    """Outputs of the tapped layers side by side, `[S, T * E]`, in the order asked for."""


class DecoderStack:
    """Layers and final norm, over packed tokens and a KV cache."""

    def __init__(
        self, config: StackConfig, layers: list[Layer], final_norm: Tensor, rotary: Rotary
    ) -> None:
        self.config = config
        self.layers = layers
        self.rotary = rotary
        self.final_norm = final_norm

    def forward(
        self,
        hidden_SE: Tensor,
        positions_S: Tensor,
        max_position: int,
        plan: Attends,
        taps: tuple[int, ...] = (),
        wanted_N: Tensor | None = None,
    ) -> StackOutput:
        """Run a pass; keys and values go into the scratch space of the plan's slots.

        Args:
            hidden_SE: embeddings of the pass's tokens.
            positions_S: their absolute positions.
            max_position: the largest of them.
            plan: how they attend.
            taps: 0-based layers whose outputs are wanted; -1 is the embedding.
            wanted_N: tokens whose output is wanted, None for all. Of the others the last layer
                computes keys and values only; it cannot be tapped then.
        """
        x = hidden_SE
        cos, sin = self.rotary.at(positions_S, max_position)
        outputs: dict[int, Tensor] = {-1: hidden_SE}
        for number, layer in enumerate(self.layers):
            heads = self.project(layer, self.norm(x, layer.input_norm), cos, sin)
            attended = plan.attend(number, heads)
            if wanted_N is not None and number == len(self.layers) - 1:
                attended, x = attended[wanted_N], x[wanted_N]
            x = layer.output.plus(attended, x)
            x = layer.down.plus(layer.gate_up(self.norm(x, layer.post_norm)), x)
            if number in taps:
                outputs[number] = x
        tapped = torch.cat([outputs[tap] for tap in taps], -1) if taps else None
        return StackOutput(self.norm(x, self.final_norm), tapped)

    def project(self, layer: Layer, normed_SE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries, rotated keys and values side by side, `[S, H + 2 G, D]`."""
        config = self.config
        heads = layer.qkv(normed_SE).unflatten(-1, (-1, config.head_dim))
        num_rotated = config.num_q_heads + config.num_kv_heads
        kernels.rotate_heads(heads, num_rotated, layer.qk_norm, config.norm_eps, cos, sin)
        return heads

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square normalisation over the last dimension."""
        if kernels.suits(x):
            return kernels.rms_norm(x, weight, self.config.norm_eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def layer_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
