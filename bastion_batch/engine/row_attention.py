"""Attention of rows with few tokens on a CPU: each row by itself, all of a layer in one call.

Trees are uneven. Computed together they are padded to the largest one, and for a handful of tokens
a library's products cost more to call than to compute. The loop (`row_loops`) reads every key and
value of a row once, for all the heads that share it, and nothing is padded. It computes in float32
and rounds the result once, so what a row gets does not depend on the rows beside it.

Measured on two cores, all 30 layers of 9 query and 3 key-value heads of 64, bfloat16, contexts of 60
to 300, against torch's attention: 64 rows of one token 52 for 106 ms, 16 rows 13 for 32, one row of 8
tokens 3.4 for 5.8, 4 rows of 9 tokens 9.0 for 10.0; but 8 tokens after a context of 1,500, 28 for 20.

Shape letters: S tokens of the pass, H query heads, G key-value heads, D head size, R rows, U
units of work.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.row_loops import JOB_FIELDS, attend, work_address
from bastion_batch.engine.team import torchs_team

MAX_TOKENS = 16
"""Of a row in the pass. Matrix units make up for the padding of larger ones."""
MAX_PAIRS = 4096
"""Of a row's (query, key) pairs; beyond it the library's cost of a call does not matter."""


class PackedRow(NamedTuple):
    """A row's place in the pass and in the cache, and what its tokens see of each other."""

    first_token: int
    slot: Slot
    visible: NDArray[np.bool_]
    """`[tokens, tokens]`: row n marks what token n sees."""


def attends_by_row(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows with few tokens are computed here."""
    return device.type == "cpu" and dtype in _WORDS


def suits(kv_cache: KVCache, num_tokens: int, context_length: int) -> bool:
    """Whether a row of so many tokens in the pass and in the cache is computed here."""
    is_small = num_tokens <= MAX_TOKENS and num_tokens * (context_length + num_tokens) <= MAX_PAIRS
    return is_small and attends_by_row(kv_cache.device, kv_cache.dtype)


class RowAttention:
    """How some rows of one pass attend; made once, used by every layer.

    Args:
        kv_cache: holds the rows' slots.
        rows: of one group of it.
    """

    def __init__(self, kv_cache: KVCache, rows: Sequence[PackedRow]) -> None:
        sizes_R = np.array([len(row.visible) for row in rows])
        contexts_R = np.array([row.slot.length for row in rows])
        first_R = [row.first_token for row in rows]
        entries_R = [row.slot.first_entry for row in rows]
        masks_R = np.cumsum(sizes_R**2) - sizes_R**2
        self._word = _WORDS[kv_cache.dtype]
        self._entries = _words(kv_cache.entries_of(rows[0].slot), self._word)
        self._rows_R = np.stack([first_R, sizes_R, entries_R, contexts_R, masks_R], 1)
        self._visible = np.concatenate([row.visible.ravel() for row in rows]).view(np.uint8)
        self._team = torchs_team()
        self._job = np.empty(JOB_FIELDS, np.int64)
        self._units_U = _divided(sizes_R, contexts_R, kv_cache.num_kv_heads, self._team.num_threads)

    def attend(self, layer: int, heads_SHD: Tensor, out_SHD: Tensor) -> None:
        """Store the rows' keys and values, then attend.

        Args:
            layer: of the cache.
            heads_SHD: queries, keys and values of the pass's tokens, `[S, H + 2 G, D]`.
            out_SHD: takes the rows' outputs, `[S, H, D]`.
        """
        attend(
            _words(heads_SHD, self._word),
            self._entries,
            layer,
            self._rows_R,
            self._visible,
            self._units_U,
            _words(out_SHD, self._word),
            self._job,
            *self._team,
            work_address(),
        )


_WORDS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.uint16,  # numpy has no bfloat16: its bits
    torch.float32: torch.float32,
}


def _words(tensor: Tensor, word: torch.dtype) -> NDArray[np.generic]:
    """A contiguous tensor's memory."""
    assert tensor.is_contiguous()
    return tensor.view(word).numpy()


def _divided(
    sizes_R: NDArray[np.integer],
    contexts_R: NDArray[np.integer],
    num_kv_heads: int,
    num_threads: int,
) -> NDArray[np.int64]:
    """Units of work, the largest first: `(row, first head, last head + 1, first token, last + 1)`.

    A whole row where there are rows enough to keep all threads busy, so that its keys are read in
    the order in which they lie; else one head, and in the end some tokens of it.
    """
    num_rows = len(sizes_R)
    num_parts = num_head_parts = 1
    if num_rows < 2 * num_threads:
        num_head_parts = num_kv_heads
        if num_threads > 1 and num_rows * num_kv_heads < 2 * num_threads:
            num_parts = num_threads
    heads = np.linspace(0, num_kv_heads, num_head_parts + 1).astype(np.int64)
    units = [
        (
            np.arange(num_rows),
            np.full(num_rows, first),
            np.full(num_rows, last),
            sizes_R * part // num_parts,
            sizes_R * (part + 1) // num_parts,
        )
        for first, last in pairwise(heads)
        for part in range(num_parts)
    ]
    units_U = np.concatenate([np.stack(unit, 1) for unit in units])
    num_tokens_U = units_U[:, 4] - units_U[:, 3]
    costs_U = num_tokens_U * (sizes_R + contexts_R)[units_U[:, 0]]
    order = np.argsort(-costs_U, kind="stable")
    return units_U[order[costs_U[order] > 0]].astype(np.int64)
