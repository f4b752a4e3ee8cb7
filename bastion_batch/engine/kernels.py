"""The small steps of a pass as one compiled loop each: bfloat16 on a CPU, few tokens.

Between two matrix products a layer normalises, rotates and so on. Done with torch these are a
dozen calls whose fixed costs come to a third of a decode pass; each of these loops is one call.
They compute in float32 and round once. Everything else takes torch's own operations: see `suits`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.compiled import compiled

MAX_TOKENS = 128
"""Loops run on one core: with more tokens than this torch's own, on all cores, are faster."""

_FAST = {"reassoc", "contract", "nsz"}  # sums may be reordered; infinities and NaN stay


def suits(x: Tensor) -> bool:
    """Whether these loops are made for a tensor of tokens."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= MAX_TOKENS


def rms_norm(x_SE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation of every token."""
    out_SE = torch.empty_like(x_SE)
    _rms_norm(_bits(x_SE), _bits(weight_E), np.float32(eps), _bits(out_SE))
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
        norm_HD: weights of the heads' own normalisation.
        eps: of that normalisation.
        cos: `[S, 1, D]`.
        sin: `[S, 1, D]`, signed for a half-swapped head.
    """
    norm = _NO_NORM if norm_HD is None else _bits(norm_HD)
    _rotate(_bits(heads_SHD), num_rotated, norm, np.float32(eps), _bits(cos), _bits(sin))


def _bits(tensor: Tensor) -> NDArray[np.uint16]:
    """A bfloat16 tensor's memory as 16-bit words."""
    return tensor.view(torch.uint16).numpy()


_NO_NORM = np.empty((0, 0), np.uint16)


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
def _rms_norm(x_SE, weight_E, eps, out_SE):  # noqa: ANN001, ANN202
    size = x_SE.shape[1]
    bits = np.empty((2, size), np.uint32)
    x, weight = bits.view(np.float32)
    _widen(weight_E, bits[1])
    for token in range(len(x_SE)):
        _widen(x_SE[token], bits[0])
        total = np.float32(0)
        for e in range(size):
            total += x[e] * x[e]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for e in range(size):
            x[e] = x[e] * scale * weight[e]
        _round(bits[0], out_SE[token])


@compiled(fastmath=_FAST, error_model="numpy")
def _rotate(heads_SHD, num_rotated, norm_HD, eps, cos_S1D, sin_S1D):  # noqa: ANN001, ANN202
    size = heads_SHD.shape[2]
    half = size // 2
    bits = np.empty((5, size), np.uint32)
    x, cos, sin, weight, out = bits.view(np.float32)
    for token in range(len(heads_SHD)):
        _widen(cos_S1D[token, 0], bits[1])
        _widen(sin_S1D[token, 0], bits[2])
        for head in range(num_rotated):
            _widen(heads_SHD[token, head], bits[0])
            if len(norm_HD):
                _widen(norm_HD[head], bits[3])
                total = np.float32(0)
                for d in range(size):
                    total += x[d] * x[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
                for d in range(size):
                    x[d] = x[d] * scale * weight[d]
            for d in range(half):
                out[d] = x[d] * cos[d] + x[half + d] * sin[d]
                out[half + d] = x[half + d] * cos[half + d] + x[d] * sin[half + d]
            _round(bits[4], heads_SHD[token, head])
