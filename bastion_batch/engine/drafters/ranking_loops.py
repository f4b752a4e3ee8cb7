"""The best tokens of every slot in one compiled loop: bfloat16 or float32 logits on a CPU.

Torch takes a call, with its own way through memory, for every small step. Here a slot's logits are
widened once, stay in the processor's cache, and are looked through by blocks.
"""

import numpy as np
import torch
from torch import Tensor

from bastion_batch.core.compiled import compiled
from bastion_batch.engine.exponentials import exponentials, largest_of
from bastion_batch.engine.floats import widen
from bastion_batch.engine.kernels import WORDS
from bastion_batch.engine.team import array_at
from bastion_batch.engine.vectors import LANES

_VECTORS = 2
"""Of a block: one of K blocks or fewer holds each of the K best."""
_BLOCK = _VECTORS * LANES


def has_loop(logits_SV: Tensor) -> bool:
    """Whether `best_of` is made for these."""
    is_packed = logits_SV.stride(1) == 1
    return logits_SV.device.type == "cpu" and logits_SV.dtype in WORDS and is_packed


def best_of(logits_SV: Tensor, num_ranks: int, banned_id: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids `[S, K]` of the best tokens, best first, the lower id on ties.

    A logit that is not a number counts as an impossible token's.

    Args:
        logits_SV: left unchanged.
        num_ranks: K, at most V.
        banned_id: a token that is given no probability; one beyond the vocabulary has none.
    """
    shape = (len(logits_SV), num_ranks)
    log_probs_SK = torch.empty(shape, dtype=torch.float32)
    ids_SK = torch.empty(shape, dtype=torch.int64)
    _best(
        logits_SV.data_ptr(),
        *logits_SV.shape,
        logits_SV.stride(0) * logits_SV.itemsize,
        WORDS[logits_SV.dtype],
        banned_id,
        num_ranks,
        log_probs_SK.data_ptr(),
        ids_SK.data_ptr(),
    )
    return log_probs_SK, ids_SK


@compiled(error_model="numpy")
def _best(logits, num_slots, size, row_bytes, like, banned_id, num_ranks, log_probs, ids):  # noqa: ANN001, ANN202
    """`logits`, `log_probs` and `ids` are addresses."""
    log_probs_SK = array_at(log_probs, (num_slots, num_ranks), np.float32(0))
    ids_SK = array_at(ids, (num_slots, num_ranks), num_slots)
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    wide_V = np.full(num_blocks * _BLOCK, np.float32(-np.inf))
    most_B = np.empty(num_blocks, np.float32)
    kept = np.empty(num_ranks, np.float32)
    for slot in range(num_slots):
        logits_V = array_at(logits + slot * row_bytes, (size,), like)
        for v in range(size):
            value = widen(logits_V[v])
            wide_V[v] = value if value == value else np.float32(-np.inf)
        wide_V[size:] = -np.inf
        if banned_id < size:
            wide_V[banned_id] = -np.inf
        for block in range(num_blocks):
            most_B[block] = largest_of(wide_V.ctypes.data + 4 * block * _BLOCK, _VECTORS)
        least = _least_of_best(most_B, kept)
        _keep_best(wide_V[:size], most_B, least, kept, ids_SK[slot])
        most = kept[0]
        total = exponentials(wide_V.ctypes.data, num_blocks * _VECTORS, most)
        log_total = np.float32(np.log(total))
        for k in range(num_ranks):
            is_possible = kept[k] > -np.inf
            log_prob = min(kept[k] - most - log_total, np.float32(0))
            log_probs_SK[slot, k] = log_prob if is_possible else np.float32(-np.inf)


@compiled()
def _least_of_best(most_B, kept):  # noqa: ANN001, ANN202
    """The K-th largest of the blocks' largest values: all K best are at least as large."""
    kept[:] = -np.inf
    last = len(kept) - 1
    for block in range(len(most_B)):
        value = most_B[block]
        if value > kept[last]:
            place = last
            while place > 0 and kept[place - 1] < value:
                kept[place] = kept[place - 1]
                place -= 1
            kept[place] = value
    return kept[last]


@compiled()
def _keep_best(wide_V, most_B, least, kept, ids):  # noqa: ANN001, ANN202
    """The K best values and where they are; values below `least` are not among them."""
    num_kept, last = 0, len(kept) - 1
    for block in range(len(most_B)):
        if most_B[block] < least:
            continue
        for v in range(block * _BLOCK, min((block + 1) * _BLOCK, len(wide_V))):
            value = wide_V[v]
            if value < least or (num_kept > last and value <= kept[last]):
                continue
            place = min(num_kept, last)
            while place > 0 and kept[place - 1] < value:
                kept[place], ids[place] = kept[place - 1], ids[place - 1]
                place -= 1
            kept[place], ids[place] = value, v
            num_kept += 1
