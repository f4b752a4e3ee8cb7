"""Attention of rows with few tokens on a CPU: each row by itself, all of a layer in one call.

Trees are uneven. Computed together they are padded to the largest one, and for a handful of tokens
a library's products cost more to call than to compute. The loop (`row_loops`) reads every key and
value of a row once, for all the heads that share it, and nothing is padded. It computes in float32
and rounds the result once, so what a row gets does not depend on the rows beside it.

Measured on two cores, all 30 layers of 9 query and 3 key-value heads of 64, bfloat16, against torch's
attention of rows of equal size: one token after 100, 0.4 for 1.3 ms; 16 rows of one token after 1,500,
38 for 97, of 4 tokens, 70 for 110; one row of 16 tokens after 200, 2.6 for 2.8; 4 of them, 10 for 8.

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
from bastion_batch.engine.kernels import WORDS
from bastion_batch.engine.row_loops import attend, new_job, work_address
from bastion_batch.engine.team import torchs_team
from bastion_batch.engine.vectors import STEP

MAX_TOKENS = 24
"""Of a row in the pass. Matrix units make up for the padding of larger ones."""
MAX_PAIRS = 1 << 15
"""Of a row's (query, key) pairs; beyond it the library's cost of a call does not matter."""
PART_KEYS = 256
"""Of how many keys a part of a row is, at most: they are to stay in a core's cache."""


class PackedRow(NamedTuple):
    """A row's place in the pass and in the cache, and what its tokens see of each other."""

    first_token: int
    slot: Slot
    visible: NDArray[np.bool_]
    """`[tokens, tokens]`: row n marks what token n sees."""


def attends_by_row(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows with few tokens are computed here."""
    return device.type == "cpu" and dtype in WORDS


def suits(kv_cache: KVCache, num_tokens: int, context_length: int) -> bool:
    """Whether a row of so many tokens in the pass and in the cache is computed here."""
    if not attends_by_row(kv_cache.device, kv_cache.dtype) or kv_cache.head_dim % STEP:
        return False
    return num_tokens <= MAX_TOKENS and num_tokens * (context_length + num_tokens) <= MAX_PAIRS


class RowAttention:
    """How some rows of one pass attend; made once, used by every layer.

    Args:
        kv_cache: holds the rows' slots.
        rows: of one group of it.
    """

    def __init__(self, kv_cache: KVCache, rows: Sequence[PackedRow], num_q_heads: int) -> None:
        sizes_R = np.array([len(row.visible) for row in rows])
        contexts_R = np.array([row.slot.length for row in rows])
        first_R = [row.first_token for row in rows]
        entries_R = [row.slot.first_entry for row in rows]
        masks_R = np.cumsum(sizes_R**2) - sizes_R**2
        parts_R = _num_parts(sizes_R + contexts_R)
        places_R = np.cumsum(sizes_R * parts_R) - sizes_R * parts_R
        self._team, self._work = torchs_team(), work_address()
        units_U = _divided(
            sizes_R, contexts_R, parts_R, kv_cache.num_kv_heads, self._team.num_threads
        )
        units_R = np.bincount(units_U[:, 0])
        fields = (first_R, sizes_R, entries_R, contexts_R, masks_R)
        rows_R = np.stack((*fields, places_R * num_q_heads, parts_R, units_R), 1)
        visible_V = np.concatenate([row.visible.ravel() for row in rows]).view(np.uint8)
        num_places = int((sizes_R * parts_R).sum()) * num_q_heads
        sums = np.empty((num_places, kv_cache.head_dim), np.float32)
        softmax = np.empty((num_places, 2), np.float32)
        done_R = np.empty(len(rows), np.int64)
        self._arrays = (rows_R, visible_V, units_U, sums, softmax, done_R)
        self._entries = kv_cache.entries_of(rows[0].slot)
        assert self._entries.is_contiguous()
        self._job = new_job(
            *self._arrays,
            num_q_heads=num_q_heads,
            num_kv_heads=kv_cache.num_kv_heads,
            num_entries=self._entries.shape[1],
            word_bytes=kv_cache.dtype.itemsize,
        )
        self._like = WORDS[kv_cache.dtype]
        self._layer_bytes = self._entries.stride(0) * kv_cache.dtype.itemsize
        self._first_layer = self._entries.data_ptr()

    def attend(self, layer: int, heads_SHD: Tensor, out_SHD: Tensor) -> None:
        """Store the rows' keys and values, then attend.

        Args:
            layer: of the cache.
            heads_SHD: queries, keys and values of the pass's tokens, `[S, H + 2 G, D]`, contiguous.
            out_SHD: takes the rows' outputs, `[S, H, D]`, contiguous.
        """
        assert heads_SHD.is_contiguous() and out_SHD.is_contiguous()  # noqa: PT018
        attend(
            self._job,
            self._like,
            heads_SHD.data_ptr(),
            len(heads_SHD),
            self._first_layer + layer * self._layer_bytes,
            out_SHD.data_ptr(),
            *self._team,
            self._work,
        )


def _num_parts(num_keys_R: NDArray[np.integer]) -> NDArray[np.integer]:
    """Into how many parts the keys of rows are divided: what a row gets must depend on it alone.

    Where one does not do, it is an even number, so that two threads share them.
    """
    return np.where(num_keys_R <= PART_KEYS, 1, -(-num_keys_R // (2 * PART_KEYS)) * 2)


def _divided(
    sizes_R: NDArray[np.integer],
    contexts_R: NDArray[np.integer],
    parts_R: NDArray[np.integer],
    num_kv_heads: int,
    num_threads: int,
) -> NDArray[np.int64]:
    """Units of work, the largest first.

    All heads of a part of a row's keys where that keeps all threads busy, so that they are read in
    the order in which they lie; else one head, and in the end some tokens of it.

    Returns:
        `(row, part, first key, last + 1, first head, last + 1, first token, last + 1)` of each.
    """
    num_parts = int(parts_R.sum())
    head_cuts = token_cuts = 1
    if num_parts < num_threads:
        head_cuts = num_kv_heads
        if num_parts * num_kv_heads < 2 * num_threads:
            token_cuts = num_threads
    row_P = np.repeat(np.arange(len(parts_R)), parts_R)
    part_P = np.arange(num_parts) - np.repeat(np.cumsum(parts_R) - parts_R, parts_R)
    keys_P, size_P = (sizes_R + contexts_R)[row_P], sizes_R[row_P]
    first_key_P, last_key_P = (keys_P * (part_P + i) // parts_R[row_P] for i in (0, 1))
    heads = np.linspace(0, num_kv_heads, head_cuts + 1).astype(np.int64)
    units = [
        (
            *(row_P, part_P, first_key_P, last_key_P),
            *(np.full(num_parts, first), np.full(num_parts, last)),
            *(size_P * cut // token_cuts, size_P * (cut + 1) // token_cuts),
        )
        for first, last in pairwise(heads)
        for cut in range(token_cuts)
    ]
    units_U = np.concatenate([np.stack(columns, 1) for columns in units])
    costs_U = (units_U[:, 3] - units_U[:, 2]) * (units_U[:, 7] - units_U[:, 6])
    order = np.argsort(-costs_U, kind="stable")
    return units_U[order[costs_U[order] > 0]].astype(np.int64)
