"""The small steps of a pass as one compiled loop each: bfloat16 on a CPU, few tokens.

Between two matrix products a layer normalises, rotates and so on. Done with torch these are a
dozen calls whose fixed costs come to a third of a decode pass; each of these loops is one call.
They compute in float32 and round once. Everything else takes torch's own operations: see `suits`.
The choice of the largest logits is here too, for float32 as well: see `has_argmax`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_batch.core.compiled import compiled
from bastion_batch.engine.exponentials import largest_stored
from bastion_batch.engine.floats import widen
from bastion_batch.engine.team import array_at
from bastion_batch.engine.vectors import STEP

MAX_TOKENS = 128
"""Loops run on one core: with more tokens than this torch's own, on all cores, are faster."""

WORDS: dict[torch.dtype, np.generic] = {
    torch.bfloat16: np.uint16(0),  # numpy has no bfloat16: its bits
    torch.float32: np.float32(0),
}
"""A number of what compiled loops see of each."""
_BLOCK = 16 * STEP
"""Logits of which the largest is found together."""
_FAST = {"reassoc", "contract", "nsz"}  # sums may be reordered; infinities and NaN stay


def suits(x: Tensor) -> bool:
    """Whether these loops are made for a tensor of tokens."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= MAX_TOKENS


def rms_norm(x_SE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation of every token."""
    x_SE = x_SE.contiguous()
    out_SE = torch.empty_like(x_SE)
    _rms_norm(x_SE.data_ptr(), *x_SE.shape, weight_E.data_ptr(), eps, out_SE.data_ptr())
    return out_SE


def rotate_heads(
    heads_SHD: Tensor,
    num_rotated: int,
    norm_HD: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Normalise (if there is a `norm_HD`) and rotate the first `num_rotated` heads, in place.

    Args:
        heads_SHD: contiguous.
        num_rotated: query and key heads, which come before the values.
        norm_HD: weights of the heads' own normalisation, contiguous.
        eps: of that normalisation.
        cos: `[S, 1, D]`.
        sin: `[S, 1, D]`, signed for a half-swapped head.
    """
    if suits(heads_SHD):
        at, norm = heads_SHD.data_ptr(), 0 if norm_HD is None else norm_HD.data_ptr()
        _rotate(at, *heads_SHD.shape, num_rotated, norm, eps, cos.data_ptr(), sin.data_ptr())
        return
    rotated = heads_SHD[:, :num_rotated]
    if norm_HD is not None:
        rotated.copy_(F.rms_norm(rotated, rotated.shape[-1:], None, eps).mul_(norm_HD))
    swapped = rotated.roll(rotated.shape[-1] // 2, -1)
    rotated.mul_(cos).addcmul_(swapped, sin)


def argmax(logits_NV: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest index on ties; NaN do not count.

    Torch's own takes about ten times as long (3.5 for 0.4 ms, 64 of 49,152), and which of several it
    gives is not said.
    """
    best_N = torch.empty(len(logits_NV), dtype=torch.int64)
    _argmax(
        logits_NV.data_ptr(),
        *logits_NV.shape,
        logits_NV.stride(0) * logits_NV.itemsize,
        WORDS[logits_NV.dtype],
        best_N.data_ptr(),
    )
    return best_N


def has_argmax(logits_NV: Tensor) -> bool:
    """Whether `argmax` is made for these."""
    is_packed = logits_NV.stride(1) == 1
    return logits_NV.device.type == "cpu" and logits_NV.dtype in WORDS and is_packed


@compiled(inline="always")
def _widen(source, out):  # noqa: ANN001, ANN202
    """bfloat16 bits to float32 bits."""
    for i in range(len(source)):
        out[i] = np.uint32(source[i]) << np.uint32(16)


@compiled(inline="always")
def _round(source, out):  # noqa: ANN001, ANN202
    """float32 bits to bfloat16 bits, to nearest, ties to even."""
    for i in range(len(source)):
        odd = (source[i] >> np.uint32(16)) & np.uint32(1)
        out[i] = np.uint16((source[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled(fastmath=_FAST, error_model="numpy")
def _rms_norm(x, num_tokens, size, weight, eps, out):  # noqa: ANN001, ANN202
    """All but sizes and `eps` are addresses of bfloat16 numbers."""
    x_SE = array_at(x, (num_tokens, size), np.uint16(0))
    weight_E = array_at(weight, (size,), np.uint16(0))
    out_SE = array_at(out, (num_tokens, size), np.uint16(0))
    bits = np.empty((2, size), np.uint32)
    values, factors = bits.view(np.float32)
    _widen(weight_E, bits[1])
    for token in range(len(x_SE)):
        _widen(x_SE[token], bits[0])
        total = np.float32(0)
        for e in range(size):
            total += values[e] * values[e]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for e in range(size):
            values[e] = values[e] * scale * factors[e]
        _round(bits[0], out_SE[token])


@compiled(fastmath=_FAST, error_model="numpy")
def _rotate(heads, num_tokens, num_heads, size, num_rotated, norm, eps, cos, sin):  # noqa: ANN001, ANN202
    """All but sizes and `eps` are addresses of bfloat16 numbers; that of `norm` may be 0."""
    heads_SHD = array_at(heads, (num_tokens, num_heads, size), np.uint16(0))
    norm_HD = array_at(norm, (num_rotated, size), np.uint16(0))
    cos_SD = array_at(cos, (num_tokens, size), np.uint16(0))
    sin_SD = array_at(sin, (num_tokens, size), np.uint16(0))
    half = size // 2
    bits = np.empty((5, size), np.uint32)
    x, cosine, sine, weight, out = bits.view(np.float32)
    for token in range(len(heads_SHD)):
        _widen(cos_SD[token], bits[1])
        _widen(sin_SD[token], bits[2])
        for head in range(num_rotated):
            _widen(heads_SHD[token, head], bits[0])
            if norm:
                _widen(norm_HD[head], bits[3])
                total = np.float32(0)
                for d in range(size):
                    total += x[d] * x[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(eps))
                for d in range(size):
                    x[d] = x[d] * scale * weight[d]
            for d in range(half):
                out[d] = x[d] * cosine[d] + x[half + d] * sine[d]
                out[half + d] = x[half + d] * cosine[half + d] + x[d] * sine[half + d]
            _round(bits[4], heads_SHD[token, head])


@compiled(error_model="numpy")
def _argmax(logits, num_rows, size, row_bytes, like, out):  # noqa: ANN001, ANN202
    """Of blocks first, then in the first of the best ones; `logits` and `out` are addresses."""
    best_N = array_at(out, (num_rows,), num_rows)
    num_blocks = size // _BLOCK
    for row in range(num_rows):
        place = logits + row * row_bytes
        logits_V = array_at(place, (size,), like)
        most, first, last = np.float32(-np.inf), 0, size
        for block in range(num_blocks):
            found = largest_stored(place + block * _BLOCK * logits_V.itemsize, _BLOCK // STEP, like)
            if found > most:
                most, first, last = found, block * _BLOCK, (block + 1) * _BLOCK
        for v in range(num_blocks * _BLOCK, size):
            value = widen(logits_V[v])
            if value > most:
                most, first, last = value, v, v + 1
        best_N[row] = 0
        for v in range(first, last):
            if widen(logits_V[v]) == most:
                best_N[row] = v
                break
