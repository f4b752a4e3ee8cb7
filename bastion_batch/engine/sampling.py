"""Choosing tokens: logits processors and Gumbel-max with keyed noise.

A token is the argmax over the surviving vocabulary of its processed logit plus noise that is a
function of (row key, absolute position, token id) alone. The text of a row therefore depends on
nothing else: not on batch-mates, trees, workers or restarts.

Shape letters: N draws, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bastion_batch.core.noise import position_key
from bastion_batch.records import SamplingParams


class Draw(NamedTuple):
    """One token to choose."""

    sampling: SamplingParams
    noise_key: int
    position: int
    """Absolute position of the token that is chosen."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Everything after the prompt on the way to this draw, path nodes included."""
    end_ids: frozenset[int]


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether the token is the argmax of the raw logits, whatever the history."""
    return (
        sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.min_new_tokens == 0
    )


def argmax(logits_NV: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest index on ties."""
    return logits_NV.max(-1).indices


def choose(logits_NV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of every draw.

    Args:
        logits_NV: the target's logits, one row per draw; left unchanged.
        draws: what to choose at each.
    """
    logits = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32), copy=True)
    for row, draw in enumerate(draws):
        _use_history(logits[row], draw)
    sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if sampled:
        logits[sampled] = _perturbed(logits[sampled], [draws[row] for row in sampled])
    return argmax(logits).tolist()


def _perturbed(logits_NV: Tensor, draws: list[Draw]) -> Tensor:
    """Scores whose argmax is a sample of each draw's distribution."""
    temperatures = [draw.sampling.temperature for draw in draws]
    logits = logits_NV / logits_NV.new_tensor(temperatures)[:, None]
    for row, draw in enumerate(draws):
        _filter(logits[row], draw.sampling)
    keys = [position_key(draw.noise_key, draw.position) for draw in draws]
    return logits + gumbel_noise(keys, logits.shape[-1], logits.device)


def _use_history(logits_V: Tensor, draw: Draw) -> None:
    """Minimum length, then repetition, presence and frequency penalties, in place."""
    sampling = draw.sampling
    if len(draw.output_ids) < sampling.min_new_tokens and draw.end_ids:
        logits_V[list(draw.end_ids)] = -torch.inf
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*draw.prompt_ids, *draw.output_ids}), device=logits_V.device)
        old = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if draw.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(draw.output_ids)
        ids = torch.tensor(list(counts), device=logits_V.device)
        occurrences = logits_V.new_tensor(list(counts.values()))
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * occurrences


def _filter(logits_V: Tensor, sampling: SamplingParams) -> None:
    """Top-k, then top-p of what is left, then min-p of what is left, in place.

    Each keeps every token that ties with the last one kept, so that the result is a function of
    the logits and not of a sort's order.
    """
    if sampling.top_k is not None and sampling.top_k < logits_V.shape[-1]:
        _keep_from(logits_V, logits_V.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1:
        _keep_from(logits_V, _nucleus_floor(logits_V, sampling.top_p))
    if sampling.min_p > 0:
        _keep_from(logits_V, logits_V.max() + torch.tensor(sampling.min_p).log().item())


def _keep_from(logits_V: Tensor, floor: Tensor) -> None:
    logits_V.masked_fill_(logits_V < floor, -torch.inf)


def _nucleus_floor(logits_V: Tensor, top_p: float) -> Tensor:
    """The smallest logit of the most probable tokens that together reach `top_p`."""
    normaliser = logits_V.logsumexp(-1)
    size = min(1024, logits_V.shape[-1])
    if logits_V.device.type != "cpu":
        size = logits_V.shape[-1]  # no look at the data, so no wait for the device
    best = logits_V.topk(size).values
    mass = (best - normaliser).exp().cumsum(-1)
    if size < logits_V.shape[-1] and mass[-1] < top_p:
        best = logits_V.sort(descending=True).values
        mass = (best - normaliser).exp().cumsum(-1)
    last = (mass < top_p).sum().clamp(max=best.shape[-1] - 1)
    return best.gather(0, last[None])[0]


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise `[len(keys), vocab_size]`, float32, a function of (key, token id).

    `g = -log(-log(1 - v))` with v in (0, 1) from 32 bits of a 64-bit hash: fine where v is small,
    which is where a token wins. The hash's bits are equal on every device.
    """
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    hashed = _token_hashes(vocab_size, device) ^ torch.tensor(signed, device=device)[:, None]
    hashed = _mix(hashed)
    bits = hashed.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """A well-mixed 64-bit word per token id."""
    return _mix(torch.arange(1, vocab_size + 1, device=device) * 0x1E3779B97F4A7C15)


def _mix(words: Tensor) -> Tensor:
    """Stafford's variant 13 of the 64-bit finaliser, in wrapping signed arithmetic."""
    words = (words ^ (words >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    words = (words ^ (words >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return words ^ (words >> 31 & 0x1FFFFFFFF)
