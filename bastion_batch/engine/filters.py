"""Filters of logits: top-k, top-p of what is left, min-p of what is left.

Each keeps every token that ties with the last one kept, so that the result is a function of the
logits and not of a sort's order.

Shape letters: N draws, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.transfer import to_device
from bastion_batch.records import SamplingParams

NUCLEUS_LOOKS = (64, 1024)
"""On a CPU, the most probable tokens looked at for a nucleus before all of them are sorted."""


def filter_logits(logits_NV: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set what each draw's filters remove to -inf, in place; the logits are tempered already."""
    vocab_size = logits_NV.shape[-1]
    top_k = {n: p.top_k for n, p in enumerate(params) if p.top_k and p.top_k < vocab_size}
    top_p = {n: p.top_p for n, p in enumerate(params) if p.top_p < 1}
    min_p = {n: p.min_p for n, p in enumerate(params) if p.min_p > 0}
    _keep_from(logits_NV, top_k, _top_k_floors)
    _keep_from(logits_NV, top_p, _nucleus_floors)
    _keep_from(logits_NV, min_p, _min_p_floors)


Floors = Callable[[Tensor, list[float]], Tensor]
"""Logits and one parameter per draw -> the smallest logit that each draw keeps, `[N, 1]`."""


def _keep_from(logits_NV: Tensor, asked: Mapping[int, float], floors_of: Floors) -> None:
    """Apply a filter to the draws that ask for it, with their parameters."""
    if not asked:
        return
    if len(asked) == len(logits_NV):
        floors = floors_of(logits_NV, list(asked.values()))
    else:
        index = to_device(np.array(list(asked)), logits_NV.device)
        floors = logits_NV.new_full((len(logits_NV), 1), -torch.inf)
        floors.index_copy_(0, index, floors_of(logits_NV[index], list(asked.values())))
    logits_NV.masked_fill_(logits_NV < floors, -torch.inf)


def _top_k_floors(logits_NV: Tensor, top_k: list[float]) -> Tensor:
    last = to_device(np.array(top_k, np.int64)[:, None] - 1, logits_NV.device)
    return logits_NV.topk(int(max(top_k))).values.gather(-1, last)


def _min_p_floors(logits_NV: Tensor, min_p: list[float]) -> Tensor:
    return logits_NV.max(-1, keepdim=True).values + column(logits_NV, [_log(p) for p in min_p])


def _nucleus_floors(logits_NV: Tensor, top_p: list[float]) -> Tensor:
    """The smallest logit of the fewest most probable tokens that together reach `top_p`.

    Sums are taken in float64: in which order, and beside which other rows, must not matter.
    """
    best = logits_NV.max(-1, keepdim=True).values
    mass = (logits_NV - best).exp().sum(-1, keepdim=True, dtype=torch.float64)
    vocab_size = logits_NV.shape[-1]
    looks = [size for size in NUCLEUS_LOOKS if size < vocab_size]
    if logits_NV.device.type != "cpu":
        looks = []  # no look at the data, so no wait for the device
    return _floors_within(logits_NV, best, column(mass, top_p) * mass, [*looks, vocab_size])


def _floors_within(logits_NV: Tensor, best: Tensor, mass: Tensor, looks: Sequence[int]) -> Tensor:
    """Nucleus floors among the `looks[0]` most probable tokens, of more where these are short."""
    size, *wider = looks
    top = logits_NV.topk(size).values
    reached = (top - best).exp().to(torch.float64).cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True)
    floors = top.gather(-1, last.clamp(max=size - 1))
    if wider:
        short = (last[:, 0] == size).nonzero()[:, 0]
        if len(short):
            floors[short] = _floors_within(logits_NV[short], best[short], mass[short], wider)
    return floors


def column(like_NV: Tensor, values: Sequence[float]) -> Tensor:
    """One value per draw, `[N, 1]`, of the type and on the device of some logits."""
    return to_device(np.array(values, np.float64)[:, None], like_NV.device).to(like_NV.dtype)


@lru_cache(maxsize=256)
def _log(value: float) -> float:
    return torch.tensor(value).log().item()
