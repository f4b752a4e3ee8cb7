"""Gumbel noise that is a function of (key, token id), and the tokens that win by it.

Shape letters: N draws, V vocabulary, I some token ids.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.transfer import to_device

NOISE_RANGE = (-3.0, 23.0)
"""All noise lies between: of 2^-33 it is 22.88, of 1 - 2^-24 it is -2.82."""

NARROW_SHARE = 0.25
"""Noise for chosen ids alone pays where they are at most this share of the vocabulary."""

FEW_LOGITS = 1 << 16
"""Draws of at most so many logits in all are made at once on a CPU too."""


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise `[len(keys), vocab_size]`, float32, a function of (key, token id).

    `g = -log(-log(1 - v))` with v in (0, 1) from 32 bits of a 64-bit hash: fine where v is small,
    which is where a token wins. The hash's bits are equal on every device.
    """
    return _noise(_token_hashes(vocab_size, device) ^ _signed(keys, device)[:, None])


def winners(
    logits_NV: Tensor, keys: Sequence[int], *, narrow: Sequence[bool] | None = None
) -> Tensor:
    """The argmax of logits plus noise of every draw, the lowest id on ties.

    On a CPU draws go one by one unless they are small, so that the work stays in the processor's
    cache; on other devices all at once, without a look at the data.

    Args:
        logits_NV: float32 or wider.
        keys: one per draw.
        narrow: marks draws of which few tokens are expected to be near the best one; the choice
            is the same, only how it is found differs.
    """
    if logits_NV.device.type != "cpu" or logits_NV.numel() <= FEW_LOGITS:
        return _argmax(logits_NV + gumbel_noise(keys, logits_NV.shape[-1], logits_NV.device))
    narrow = narrow or [False] * len(keys)
    draws = zip(logits_NV, keys, narrow, strict=True)
    return torch.stack([_winner(*draw) for draw in draws])


def _winner(logits_V: Tensor, key: int, narrow: bool) -> Tensor:
    if narrow:
        ids_I = able_to_win(logits_V)
        if 0 < len(ids_I) <= NARROW_SHARE * len(logits_V):
            hashes = _token_hashes(len(logits_V), logits_V.device)[ids_I]
            noise = _noise(hashes ^ _signed([key], logits_V.device))
            return ids_I[_argmax(logits_V[ids_I] + noise)]
    return _argmax(logits_V + gumbel_noise([key], len(logits_V), logits_V.device)[0])


def able_to_win(logits_V: Tensor) -> Tensor:
    """The ids that some noise lets win, in order.

    With the noise between `low` and `high`, and because rounding keeps the order of sums, a token
    whose logit + high is under the best logit + low always has a smaller sum than the best one.
    """
    low, high = NOISE_RANGE
    return (logits_V + high >= logits_V.max() + low).nonzero()[:, 0]


def _argmax(scores: Tensor) -> Tensor:
    return scores.max(-1).indices


def _signed(keys: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(keys, np.uint64).view(np.int64), device)


def _noise(hashed: Tensor) -> Tensor:
    """Noise of (token hash ^ key) words, which are used up."""
    bits = _mix_(hashed).bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    below = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-(1 - 2.0**-24))
    return below.log1p_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """A well-mixed 64-bit word per token id."""
    return _mix_(torch.arange(1, vocab_size + 1, device=device) * 0x1E3779B97F4A7C15)


def _mix_(words: Tensor) -> Tensor:
    """Stafford's variant 13 of the 64-bit finaliser, in wrapping signed arithmetic, in place."""
    shifted = torch.empty_like(words)
    _xor_shifted(words, 30, shifted).mul_(-0x40A7B892E31B1A47)
    _xor_shifted(words, 27, shifted).mul_(-0x6B2FB644ECCEEE15)
    return _xor_shifted(words, 31, shifted)


def _xor_shifted(words: Tensor, bits: int, shifted: Tensor) -> Tensor:
    """`words ^= words >> bits`, the shift logical; `shifted` is overwritten."""
    torch.bitwise_right_shift(words, bits, out=shifted)
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))
