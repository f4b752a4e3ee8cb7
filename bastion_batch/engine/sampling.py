"""Choosing tokens: logits processors and Gumbel-max with keyed noise.

A token is the argmax over the surviving vocabulary of its processed logit plus noise that is a
function of (row key, absolute position, token id) alone. The text of a row therefore depends on
nothing else: not on batch-mates, trees, workers or restarts.

Processors apply in this order: bans, bias, minimum length; repetition, presence and frequency
penalties; temperature; top-k; top-p; min-p. On other devices than a CPU nothing here looks at the
data, so nothing waits for the device.

Shape letters: N draws, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.noise import position_key
from bastion_batch.engine import kernels
from bastion_batch.engine.filters import column, filter_logits
from bastion_batch.engine.history import History
from bastion_batch.engine.noise import winners
from bastion_batch.engine.transfer import to_device
from bastion_batch.records import SamplingParams

DRAWS_AT_ONCE = 64
"""Draws whose logits are copied and processed together; bounds the memory they take."""

COOL = 0.5
"""A temperature up to which few tokens are near the best one."""


class Draw(NamedTuple):
    """One token to choose."""

    sampling: SamplingParams
    noise_key: int
    position: int
    """Absolute position of the token that is chosen."""
    history: History
    path_ids: Sequence[int]
    """Tokens of the nodes between the history's output and this draw."""
    end_ids: frozenset[int]

    @property
    def num_output(self) -> int:
        """Tokens after the prompt on the way to this draw."""
        return len(self.history.output_ids) + len(self.path_ids)


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether the token is the argmax of the raw logits, whatever the history."""
    return (
        sampling.temperature == 0
        and not _is_penalised(sampling)
        and sampling.min_new_tokens == 0
        and not sampling.banned_ids
        and not sampling.logit_bias
    )


def argmax(logits_NV: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest index on ties."""
    if kernels.has_argmax(logits_NV):
        return kernels.argmax(logits_NV)
    return logits_NV.max(-1).indices


def choose(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The token of every draw, `[N]`, on the logits' device.

    Args:
        logits_NV: the target's logits, one row per draw; left unchanged.
        draws: what to choose at each; their tokens are in the vocabulary, and not all are banned.
    """
    device = logits_NV.device
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    tokens_N = torch.empty(len(draws), dtype=torch.int64, device=device)
    for kind, places in _alike(draws):
        index = to_device(np.array(places), device)
        is_all = len(places) == len(draws)
        logits, part = logits_NV if is_all else logits_NV[index], [draws[n] for n in places]
        if kind != "plain":
            logits = _use_history(logits.to(wide, copy=is_all), part)
        found = _sample(logits, part) if kind == "sampled" else argmax(logits)
        tokens_N.index_copy_(0, index, found)
    return tokens_N


def _alike(draws: Sequence[Draw]) -> Iterator[tuple[str, list[int]]]:
    """The draws that are processed together, by what has to be done."""
    kinds: dict[str, list[int]] = {}
    for place, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            kind = "sampled"
        else:
            kind = "plain" if is_plain_greedy(draw.sampling) else "greedy"
        kinds.setdefault(kind, []).append(place)
    for kind, places in kinds.items():
        rest = iter(places)
        while part := list(islice(rest, DRAWS_AT_ONCE)):
            yield kind, part


def _use_history(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Bans, bias, minimum length, then the penalties, in place."""
    _bias(logits_NV, draws)
    _remove(logits_NV, draws)
    _penalise(logits_NV, draws)
    return logits_NV


def _bias(logits_NV: Tensor, draws: Sequence[Draw]) -> None:
    biased = [(n, *_bias_arrays(draw.sampling.logit_bias)) for n, draw in enumerate(draws)
              if draw.sampling.logit_bias]  # fmt: skip
    if biased:
        at = _flat(logits_NV, [(n, ids) for n, ids, _ in biased])
        bias = np.concatenate([values for _, _, values in biased])
        logits_NV.view(-1).index_add_(0, at, to_device(bias, at.device).to(logits_NV.dtype))


@lru_cache(maxsize=256)
def _bias_arrays(
    logit_bias: tuple[tuple[int, float], ...],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, values = zip(*logit_bias, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float64)


def _remove(logits_NV: Tensor, draws: Sequence[Draw]) -> None:
    """Bans, and end tokens before the minimum length: no bias brings a removed token back."""
    removed = [(n, _removed_ids(draw)) for n, draw in enumerate(draws)]
    removed = [(n, ids) for n, ids in removed if len(ids)]
    if removed:
        logits_NV.view(-1).index_fill_(0, _flat(logits_NV, removed), -torch.inf)


def _removed_ids(draw: Draw) -> NDArray[np.int64]:
    too_short = draw.num_output < draw.sampling.min_new_tokens
    return _id_array(draw.sampling.banned_ids, draw.end_ids if too_short else frozenset())


@lru_cache(maxsize=256)
def _id_array(banned_ids: tuple[int, ...], end_ids: frozenset[int]) -> NDArray[np.int64]:
    return np.array([*banned_ids, *end_ids], np.int64)


def _is_penalised(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )  # fmt: skip


def _penalise(logits_NV: Tensor, draws: Sequence[Draw]) -> None:
    """Repetition over prompt and output, then presence and frequency over the output."""
    penalised = [n for n, draw in enumerate(draws) if _is_penalised(draw.sampling)]
    counts = [draws[n].history.counts(draws[n].path_ids) for n in penalised]
    if not sum(len(count.ids) for count in counts):
        return
    at = _flat(logits_NV, [(n, c.ids) for n, c in zip(penalised, counts, strict=True)])

    def spread(values: Sequence[float]) -> Tensor:
        each = np.repeat(np.array(values, np.float64), [len(count.ids) for count in counts])
        return to_device(each, at.device).to(logits_NV.dtype)

    params = [draws[n].sampling for n in penalised]
    times = to_device(np.concatenate([count.times for count in counts]), at.device)
    repetition = spread([p.repetition_penalty for p in params])
    presence = spread([p.presence_penalty for p in params])
    frequency = spread([p.frequency_penalty for p in params])
    old = logits_NV.view(-1)[at]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new -= presence * (times > 0) + frequency * times
    logits_NV.view(-1).index_copy_(0, at, new)


def _flat(logits_NV: Tensor, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Places of some tokens of some rows in the flattened logits."""
    at = np.concatenate([number * logits_NV.shape[-1] + ids for number, ids in rows])
    return to_device(at, logits_NV.device)


def _sample(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A sample of each draw's distribution; overwrites the logits."""
    params = [draw.sampling for draw in draws]
    logits_NV /= column(logits_NV, [p.temperature for p in params])
    filter_logits(logits_NV, params)
    keys = [position_key(draw.noise_key, draw.position) for draw in draws]
    return winners(logits_NV, keys, narrow=[_is_narrow(p) for p in params])


def _is_narrow(sampling: SamplingParams) -> bool:
    filters = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
    return filters or sampling.temperature <= COOL
