"""The drafter as a differentiable module: many blocks of many texts in one pass.

Parameters have the names of z-lab's checkpoint format, so that the module's state is the file.

Shape letters: B texts, T tokens of the longest, A anchors of a text, W slots of a block,
S = A * W slots of a text, E hidden size, F features of a token, H query heads, G key-value heads,
D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from bastion_batch.engine.transformer import Rotary
from bastion_batch.training.settings import Shape


class BlockBatch(NamedTuple):
    """Blocks to predict. Texts with fewer anchors repeat their last one, with no weight."""

    features_BTF: Tensor
    """Taps of the texts' tokens, padded with zeros."""
    anchors_BA: Tensor
    """Positions of the blocks' slots 0."""
    embeddings_BSE: Tensor
    """Of the anchors' tokens and of the mask."""


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self._eps)
        return (normed * self.weight).to(x.dtype)


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, size, eps = shape.hidden_size, shape.head_dim, shape.norm_eps
        bias = shape.attention_bias
        self.q_proj = _linear(hidden, shape.num_q_heads * size, bias=bias)
        self.k_proj = _linear(hidden, shape.num_kv_heads * size, bias=bias)
        self.v_proj = _linear(hidden, shape.num_kv_heads * size, bias=bias)
        self.o_proj = _linear(shape.num_q_heads * size, hidden, bias=bias)
        self.q_norm, self.k_norm = _RMSNorm(size, eps), _RMSNorm(size, eps)
        self._head_dim = size
        self._group = shape.num_q_heads // shape.num_kv_heads

    def forward(
        self, x_BSE: Tensor, context_BTE: Tensor, mask: Tensor, rotation: "_Rotation"
    ) -> Tensor:
        both = torch.cat([context_BTE, x_BSE], 1)
        queries = _rotated(self.q_norm(self._heads(self.q_proj(x_BSE))), *rotation.queries)
        keys = _rotated(self.k_norm(self._heads(self.k_proj(both))), *rotation.keys)
        values = self._heads(self.v_proj(both))
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2).repeat_interleave(self._group, 1),
            values.transpose(1, 2).repeat_interleave(self._group, 1),
            attn_mask=mask.to(queries.dtype),
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim))


class _FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.ffn_size)
        self.up_proj = _linear(shape.hidden_size, shape.ffn_size)
        self.down_proj = _linear(shape.ffn_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, rotation: "_Rotation") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, mask, rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Rotation(NamedTuple):
    """Cosines and signed sines `[B, tokens, 1, D]` of the block's and of all positions."""

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


class DrafterModel(nn.Module):
    """A DFlash drafter of a shape; weights are random until they are loaded."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(shape.taps) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        config = Qwen3Config(
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_q_heads,
            max_position_embeddings=shape.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
        self._rotary = Rotary(config, torch.float32, torch.device("cpu"))

    def forward(self, batch: BlockBatch) -> Tensor:
        """What the head scores, `[B, A, W - 1, E]`: the outputs of the masked slots."""
        features, anchors_BA, x = batch
        width = self.shape.block_size
        num_tokens = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        slots_BS = (anchors_BA[:, :, None] + torch.arange(width, device=x.device)).flatten(1)
        rotation = self._rotation(slots_BS, num_tokens)
        mask = _mask(anchors_BA, width, num_tokens)
        for layer in self.layers:
            x = layer(x, context, mask, rotation)
        return self.norm(x).unflatten(1, (-1, width))[:, :, 1:]

    def _rotation(self, slots_BS: Tensor, num_tokens: int) -> _Rotation:
        context = torch.arange(num_tokens, device=slots_BS.device).expand(len(slots_BS), -1)
        positions = torch.cat([context, slots_BS], 1)
        flat = positions.flatten().cpu()
        tables = self._rotary.at(flat, int(flat.max()))
        cos, sin = (t.to(positions.device).unflatten(0, (len(positions), -1)) for t in tables)
        return _Rotation((cos[:, num_tokens:], sin[:, num_tokens:]), (cos, sin))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos + swapped * sin).to(heads.dtype)


def _mask(anchors_BA: Tensor, width: int, num_tokens: int) -> Tensor:
    """Additive `[B, 1, S, T + S]`: a block sees the context before its anchor, and itself."""
    device = anchors_BA.device
    anchors_BS = anchors_BA.repeat_interleave(width, 1)
    context = torch.arange(num_tokens, device=device) < anchors_BS[:, :, None]
    block = torch.arange(anchors_BS.shape[1], device=device) // width
    own = (block[:, None] == block).expand(len(anchors_BA), -1, -1)
    visible = torch.cat([context, own], 2)[:, None]
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
