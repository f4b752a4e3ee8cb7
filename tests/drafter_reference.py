"""The forward pass of a drafter from its published formulas: one row, one block, no cache, float64.

Slow and obvious, with loops over heads; written from the description of each family's formats and
not from the code under test, whose modules it does not import.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from drafter_fixtures import EPS, HEADS, KV_HEADS, MASK, SIZE, THETA, YARN, Meaning, Sees
from torch import Tensor


class Block(NamedTuple):
    """What a drafter computes for a block."""

    hidden_WE: Tensor
    """After the final norm."""
    logits_WU: Tensor
    """After multiplier and softcap, before conditional heads."""


class _Layer(NamedTuple):
    weights: dict[str, Tensor]
    sees: Sees
    meaning: Meaning


def reference_block(
    tensors: dict[str, Tensor],
    meaning: Meaning,
    features: Tensor,
    root: int,
    *,
    embedding: Tensor,
    head: Tensor,
) -> Block:
    """Compute one block after a context with these features.

    Args:
        tensors: under normalised names.
        meaning: of the file.
        features: taps of the context, `[tokens, T * E_target]`.
        root: the last committed token.
        embedding: the target's, where the drafter has none.
        head: the target's, where the drafter has none.
    """
    w = {name.removesuffix(".weight"): value.double() for name, value in tensors.items()}
    block = torch.tensor([root] + [MASK] * (meaning.width - 1))
    x = w.get("embed_tokens", embedding)[block] * meaning.embedding_scale
    context = norm(features @ w["fc"].T, w["hidden_norm"])
    for number, sees in enumerate(meaning.layers):
        prefix = f"layers.{number}."
        own = {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}
        x = _layer(_Layer(own, sees, meaning), x, context)
    hidden = norm(x, w["norm"])
    logits = hidden @ w.get("lm_head", head).T * meaning.multiplier
    if meaning.softcap is not None:
        logits = (logits / meaning.softcap).tanh() * meaning.softcap
    return Block(hidden, logits)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square normalisation."""
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _layer(layer: _Layer, x: Tensor, context: Tensor) -> Tensor:
    w = layer.weights
    u = norm(x, w["input_layernorm"])
    u, finish = _convolved(layer, "attention_conv", u)
    x = x + finish(_attend(layer, u, context))
    u = norm(x, w["post_attention_layernorm"])
    u, finish = _convolved(layer, "mlp_conv", u)
    inner = F.silu(u @ w["mlp.gate_proj"].T) * (u @ w["mlp.up_proj"].T)
    return x + finish(inner @ w["mlp.down_proj"].T)


def _attend(layer: _Layer, u: Tensor, context: Tensor) -> Tensor:
    w, meaning = layer.weights, layer.meaning
    width, length = len(u), len(context)
    both = torch.cat([context, u])  # the context does not pass the layer's input norm
    q, k, v = (_projected(w, name, x) for name, x in (("q", u), ("k", both), ("v", both)))
    at = torch.arange(length + width)
    q = _rotated(norm(q, w["self_attn.q_norm"]), at[length:], meaning)
    k = _rotated(norm(k, w["self_attn.k_norm"]), at, meaning)
    v = v * meaning.value_scale
    seen = torch.tensor(
        [[_sees(layer.sees, length, slot, key) for key in at.tolist()] for slot in range(width)]
    )
    attended = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, group].T / SIZE**0.5
        attended.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, group])
    out = torch.cat(attended, -1) @ w["self_attn.o_proj"].T
    return out + w.get("self_attn.o_proj.bias", torch.zeros(()))


def _projected(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ w[f"self_attn.{name}_proj"].T
    return (out + w.get(f"self_attn.{name}_proj.bias", torch.zeros(()))).unflatten(-1, (-1, SIZE))


def _sees(sees: Sees, length: int, slot: int, key: int) -> bool:
    """Whether a slot of a block after so much context sees the key at a position."""
    query = length + slot
    in_block = key >= length
    if sees.causal and key > query:
        return False
    if sees.window is None or (in_block and sees.from_anchor):
        return True
    if sees.from_anchor:
        return key >= length - sees.window
    return query - key < sees.window and key - query < sees.window


def _rotated(heads: Tensor, positions: Tensor, meaning: Meaning) -> Tensor:
    """`[tokens, heads, SIZE]` at absolute positions."""
    frequencies, scale = _yarn() if meaning.yarn else (_frequencies(), 1.0)
    angles = positions[:, None, None].double() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if meaning.interleaved:
        one, other = heads[..., 0::2], heads[..., 1::2]
        turned = [one * cos - other * sin, other * cos + one * sin]
        return torch.stack(turned, -1).flatten(-2)
    one, other = heads.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def _frequencies() -> Tensor:
    return THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)


def _yarn() -> tuple[Tensor, float]:
    """Frequencies and scale of YaRN (arXiv 2309.00071), with its usual bounds of 32 and 1 turns."""
    factor, original = YARN["factor"], YARN["original_max_position_embeddings"]
    theta = torch.tensor(THETA, dtype=torch.float64)

    def index_of(turns: float) -> Tensor:
        """The channel pair that turns so often over the original context."""
        return SIZE * (original / (turns * 2 * torch.pi)).log() / (2 * theta.log())

    original = torch.tensor(float(original), dtype=torch.float64)
    low = index_of(32).floor().clamp(min=0)
    high = index_of(1).ceil().clamp(max=SIZE - 1)
    ramp = ((torch.arange(SIZE // 2) - low) / (high - low)).clamp(0, 1)
    frequencies = _frequencies() * (1 - ramp) + _frequencies() / factor * ramp
    return frequencies, float(0.1 * torch.tensor(factor).log() + 1)


def _convolved(layer: _Layer, name: str, u: Tensor):
    """A sublayer's convolved input, and what convolves its output."""
    group = layer.meaning.conv_group
    if group is None:
        return u, lambda out: out
    base = layer.weights[f"{name}.base_kernel"]
    dynamic = u @ layer.weights[f"{name}.kernel_projection"].T
    dynamic = dynamic.unflatten(-1, (2, base.shape[1], -1)).repeat_interleave(group, -1)

    def convolve(x: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(len(x)):
            for back in range(min(base.shape[1], slot + 1)):
                coefficients = base[side, back] + dynamic[slot, side, back]
                out[slot] += coefficients * x[slot - back]
        return out

    return convolve(u, 0), lambda out: convolve(out, 1)
