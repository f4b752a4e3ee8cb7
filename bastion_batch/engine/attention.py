"""Attention of one packed pass: which rows are computed together and what each token sees.

A pass is one sequence of tokens, row after row. Linear layers see exactly those tokens; attention
runs once per batch of rows that lie side by side in the cache, or on a CPU, for rows with few
tokens, row by row (`row_attention`). Tokens of a row see the row's whole context and, among the
row's own tokens, what the row's `visible` matrix says: ancestors in a tree, earlier tokens in a
prompt, everything in a drafter's block.

Shape letters: S tokens of the pass, B rows of a batch, T tokens of its longest row, K keys,
H query heads, G key-value heads, Q = H / G query heads per key-value head, D head size.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.row_attention import PackedRow, RowAttention, suits
from bastion_batch.engine.transfer import to_device


def call_pairs(device: torch.device) -> int:
    """How many (query, key) pairs take as long as calling attention once more."""
    return 262_144 if device.type == "cuda" else 4096


class PassRow(NamedTuple):
    """One row's share of a pass: `num_tokens` tokens after the context in its slot."""

    slot: Slot
    num_tokens: int
    visible: NDArray[np.bool_] | None
    """`[num_tokens, num_tokens]`, row n marks what token n sees; None for a causal chunk."""
    oldest_T: NDArray[np.intp] | None = None
    """The first context token that each token sees, `[num_tokens]`; None where all see all."""

    def sees(self) -> NDArray[np.bool_]:
        """What its tokens see of each other, `[num_tokens, num_tokens]`."""
        return np.tri(self.num_tokens, dtype=np.bool_) if self.visible is None else self.visible


class _Batch(NamedTuple):
    slots: list[Slot]
    start: int  # first token in the pass
    stop: int
    num_keys: int
    places_S: Tensor  # flat cache places of its tokens
    pad_BT: Tensor | None  # token of the pass for every padded place; None if nothing is padded
    unpad_S: Tensor | None
    mask: Tensor | None  # additive, [B, 1, T * Q, K]; None if every token sees all keys


class Attends(Protocol):
    """How every layer of a pass attends."""

    def attend(self, layer: int, heads_SHD: Tensor) -> Tensor:
        """Store the tokens' keys and values, then attend.

        Args:
            layer: of the cache.
            heads_SHD: queries, keys and values side by side, `[S, H + 2 G, D]`, contiguous.

        Returns:
            `[S, H * D]`.
        """
        ...


class AttentionPlan:
    """How one pass attends; made once, used by every layer.

    Rows must be given in the order of `pass_order`. Valid until a slot of the cache is opened,
    closed or moved.

    Args:
        cache: holds the rows' slots; each has room for the row's tokens.
        rows: what each row adds to its context.
        num_q_heads: H.
        num_padding: tokens after those of the rows, which attend to nothing and are not stored.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Sequence[PassRow],
        num_q_heads: int,
        *,
        num_padding: int = 0,
    ) -> None:
        self._cache = cache
        self._num_q_heads = num_q_heads
        self._num_padding = num_padding
        self._batches: list[_Batch] = []
        self._by_row: list[RowAttention] = []
        placed = _placed(rows)
        few = [pair for pair in placed if _attends_alone(cache, pair[1])]
        for _, pairs in groupby(few, key=lambda pair: pair[1].slot.capacity):
            packed = [PackedRow(start, row.slot, row.sees()) for start, row in pairs]
            self._by_row.append(RowAttention(cache, packed, num_q_heads))
        many = [pair for pair in placed if not _attends_alone(cache, pair[1])]
        for start, batch in _side_by_side(many, call_pairs(cache.device)):
            self._batches.append(_make_batch(cache, batch, start, num_q_heads))

    def attend(self, layer: int, heads_SHD: Tensor) -> Tensor:
        """See `Attends`."""
        num_tokens, num_q_heads = len(heads_SHD), self._num_q_heads
        batches = self._batches
        if len(batches) == 1 and batches[0].stop - batches[0].start == num_tokens:
            return self._attended(batches[0], layer, heads_SHD)
        out_SHD = heads_SHD.new_empty(num_tokens, num_q_heads, heads_SHD.shape[-1])
        for rows in self._by_row:
            rows.attend(layer, heads_SHD, out_SHD)
        out_SF = out_SHD.flatten(1)
        for batch in batches:
            out_SF[batch.start : batch.stop] = self._attended(batch, layer, heads_SHD)
        if self._num_padding:
            out_SF[num_tokens - self._num_padding :] = 0
        return out_SF

    def _attended(self, batch: _Batch, layer: int, heads_SHD: Tensor) -> Tensor:
        heads_SHD = heads_SHD[batch.start : batch.stop]
        keys_values = keys_values_of(heads_SHD, self._num_q_heads)
        self._cache.write(layer, batch.slots[0], batch.places_S, keys_values)
        keys, values = self._cache.layer_view(layer, batch.slots, batch.num_keys)
        return _attend(batch, heads_SHD[:, : self._num_q_heads], keys, values)


def keys_values_of(heads_SHD: Tensor, num_q_heads: int) -> Tensor:
    """Keys and values `[S, 2, G, D]` of what lies side by side as `Attends.attend` takes it."""
    return heads_SHD[:, num_q_heads:].unflatten(1, (2, -1))


class StorePlan:
    """Where a packed sequence of new context tokens goes, without attending to anything."""

    def __init__(self, cache: KVCache, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        self._cache = cache
        self._parts: list[tuple[Slot, Tensor, Tensor]] = []
        start = 0
        tokens: dict[int, tuple[Slot, list[int], list[int]]] = {}
        for slot, count in zip(slots, counts, strict=True):
            _, sources, places = tokens.setdefault(slot.capacity, (slot, [], []))
            first = slot.first_entry + slot.length
            sources.extend(range(start, start + count))
            places.extend(range(first, first + count))
            start += count
        for slot, sources, places in tokens.values():
            from_S, to_S = (
                to_device(np.array(p, np.int64), cache.device) for p in (sources, places)
            )
            self._parts.append((slot, from_S, to_S))

    def store(self, layer: int, keys_values: Tensor) -> None:
        """Store the tokens' keys and values `[S, 2, G, D]` after their rows' contexts."""
        for slot, sources, places in self._parts:
            self._cache.write(layer, slot, places, keys_values[sources])


def pass_order(slots: Sequence[Slot], is_prompt: Sequence[bool]) -> list[int]:
    """The order in which rows must enter a pass, so that batches lie side by side."""
    keys = [(p, s.capacity, s.index) for s, p in zip(slots, is_prompt, strict=True)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _placed(rows: Sequence[PassRow]) -> list[tuple[int, PassRow]]:
    """Each row with its first token in the pass."""
    starts = accumulate((row.num_tokens for row in rows), initial=0)
    return list(zip(starts, rows, strict=False))


def _attends_alone(cache: KVCache, row: PassRow) -> bool:
    return row.oldest_T is None and suits(cache, row.num_tokens, row.slot.length)


def _side_by_side(
    placed: Sequence[tuple[int, PassRow]], pairs_per_call: int
) -> list[tuple[int, list[PassRow]]]:
    """Cut the rows into batches that lie side by side in the cache and in the pass.

    A row joins the batch before it unless what both would be padded by costs more than a batch of
    its own does.

    Returns:
        first token and rows of each batch.
    """
    batches: list[tuple[int, list[PassRow]]] = []
    longest = most_keys = stop = 0
    for start, row in placed:
        size, num_keys = row.num_tokens, row.slot.length + row.num_tokens
        both = (max(longest, size), max(most_keys, num_keys))
        follows = stop == start
        stop = start + size
        if batches and follows and _are_neighbours(batches[-1][1][-1], row):
            count = len(batches[-1][1])
            apart = count * longest * most_keys + size * num_keys + pairs_per_call
            if (count + 1) * both[0] * both[1] <= apart:
                batches[-1][1].append(row)
                longest, most_keys = both
                continue
        batches.append((start, [row]))
        longest, most_keys = size, num_keys
    return batches


def _are_neighbours(left: PassRow, right: PassRow) -> bool:
    return left.slot.capacity == right.slot.capacity and left.slot.index + 1 == right.slot.index


def _make_batch(cache: KVCache, rows: list[PassRow], start: int, num_q_heads: int) -> _Batch:
    device = cache.device
    sizes = np.array([row.num_tokens for row in rows])
    contexts = np.array([row.slot.length for row in rows])
    longest = int(sizes.max())
    num_keys = int((contexts + sizes).max())
    ends = np.cumsum(sizes)
    within = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    first = np.array([row.slot.first_entry for row in rows]) + contexts
    padded = bool((sizes != longest).any())
    at_BT = np.arange(longest)[None, :]
    pad_BT = (ends - sizes)[:, None] + np.minimum(at_BT, sizes[:, None] - 1)
    unpad_S = np.repeat(np.arange(len(rows)) * longest, sizes) + within
    return _Batch(
        slots=[row.slot for row in rows],
        start=start,
        stop=start + int(ends[-1]),
        num_keys=num_keys,
        places_S=to_device(np.repeat(first, sizes) + within, device),
        pad_BT=to_device(pad_BT.ravel(), device) if padded else None,
        unpad_S=to_device(unpad_S, device) if padded else None,
        mask=_mask(cache, rows, longest, num_keys, num_q_heads // cache.num_kv_heads),
    )


def _mask(
    cache: KVCache, rows: list[PassRow], longest: int, num_keys: int, fold: int
) -> Tensor | None:
    """Additive mask of a batch, or None where all see all.

    A padded token sees what its row's last token does: a query that sees nothing gives NaN.
    """
    contexts = np.array([row.slot.length for row in rows])
    own_BTT = np.zeros((len(rows), longest, longest), np.bool_)
    for number, row in enumerate(rows):
        size = row.num_tokens
        own_BTT[number, :size, :size] = row.sees()
        own_BTT[number, size:] = own_BTT[number, size - 1]
    has_windows = any(row.oldest_T is not None for row in rows)
    if own_BTT.all() and (contexts == contexts[0]).all() and not has_windows:
        return None
    own = to_device(own_BTT, cache.device)
    beyond_BK = (
        torch.arange(num_keys, device=cache.device) - to_device(contexts, cache.device)[:, None]
    )
    in_own = (beyond_BK >= 0) & (beyond_BK < longest)
    at = beyond_BK.clamp(0, longest - 1)[:, None, :].expand(-1, longest, -1)
    visible = (beyond_BK < 0)[:, None, :]
    if has_windows:
        oldest_BT = to_device(_oldest(rows, longest), cache.device)
        keys_K = torch.arange(num_keys, device=cache.device)
        visible = visible & (keys_K >= oldest_BT[..., None])
    visible = visible | (own.gather(2, at) & in_own[:, None, :])
    mask = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device)
    mask.masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(fold, 1)[:, None]


def _oldest(rows: list[PassRow], longest: int) -> NDArray[np.intp]:
    """The first context token that each token of a padded batch sees, `[B, T]`."""
    oldest_BT = np.zeros((len(rows), longest), np.intp)
    for number, row in enumerate(rows):
        if row.oldest_T is not None:
            oldest_BT[number, : row.num_tokens] = row.oldest_T
            oldest_BT[number, row.num_tokens :] = row.oldest_T[-1]
    return oldest_BT


def _attend(batch: _Batch, queries_SHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    num_rows, num_kv_heads = keys.shape[:2]
    num_heads, head_dim = queries_SHD.shape[1:]
    group = num_heads // num_kv_heads
    queries = queries_SHD if batch.pad_BT is None else queries_SHD[batch.pad_BT]
    # Query heads that share keys are folded into the query axis: one pass over the keys serves all.
    queries = queries.view(num_rows, -1, num_kv_heads, group, head_dim).transpose(1, 2)
    folded = queries.reshape(num_rows, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=batch.mask)
    out = out.view(num_rows, num_kv_heads, -1, group, head_dim).transpose(1, 2)
    out = out.reshape(-1, num_heads * head_dim)
    return out if batch.unpad_S is None else out[batch.unpad_S]
