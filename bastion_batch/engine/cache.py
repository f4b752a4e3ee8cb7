"""The KV cache: contiguous and growing per row, rows of similar capacity side by side.

A `Slot` is one row's place. Slots of equal capacity share a group, one tensor for all layers, in
which the open slots are always the first ones: a pass over a group reads a plain slice of it and
nothing is gathered. A row that outgrows its capacity moves to the next group; a closed slot is
filled by the group's last one. Only `Slot.length` says which entries are valid: what lies beyond
is scratch space that a pass may fill with nodes and a commit turns into context.

Shape letters: L layers, S slots of a group, C capacity in tokens, 2 keys and values, G key-value
heads, D head size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CAPACITIES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Capacities in tokens; beyond the last, multiples of it."""


class Slot:
    """One row's place in the cache. `length` tokens of it are valid."""

    __slots__ = ("_group", "index", "length")

    def __init__(self, group: "_Group", index: int) -> None:
        self._group = group
        self.index = index
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit without moving."""
        return self._group.capacity

    @property
    def first_entry(self) -> int:
        """Where the slot begins in its group's flattened entries."""
        return self.index * self._group.capacity


class Move(NamedTuple):
    """Entries of a slot that become its next context tokens, in order.

    `offsets` count from the slot's length: a path of nodes 2, 5 is `(0, 2, 5)` with its root.
    """

    slot: Slot
    offsets: Sequence[int]


class _Group:
    def __init__(self, cache: "KVCache", capacity: int) -> None:
        self.cache = cache
        self.capacity = capacity
        self.slots: list[Slot] = []
        self.entries = cache.new_entries(0)

    @property
    def num_allocated(self) -> int:
        return self.entries.shape[1] // self.capacity

    def add(self, slot: Slot) -> None:
        if len(self.slots) == self.num_allocated:
            self._resize(max(1, 2 * self.num_allocated))
        slot._group, slot.index = self, len(self.slots)
        self.slots.append(slot)

    def remove(self, slot: Slot) -> None:
        last = self.slots.pop()
        if last is not slot:
            self.copy(last, slot.first_entry)
            last.index = slot.index
            self.slots[last.index] = last
        if len(self.slots) <= self.num_allocated // 4:
            self._resize(self.num_allocated // 2)

    def clear(self, slot: Slot) -> None:
        """Zero a slot: what its last tenant left may not be finite, and scratch must be."""
        self.entries[:, slot.first_entry : slot.first_entry + self.capacity].zero_()

    def copy(self, source: Slot, first_entry: int) -> None:
        """Copy the valid tokens of a slot, of this or another group, to an entry of this one."""
        start, length = source.first_entry, source.length
        target = self.entries[:, first_entry : first_entry + length]
        target.copy_(source._group.entries[:, start : start + length])

    def _resize(self, num_slots: int) -> None:
        used = len(self.slots) * self.capacity
        entries = self.cache.new_entries(num_slots * self.capacity)
        entries[:, :used] = self.entries[:, :used]
        self.entries = entries


class KVCache:
    """Keys and values of all live rows.

    Args:
        num_layers: layers that attend.
        num_kv_heads: key-value heads.
        head_dim: their size.
        dtype: of the entries.
        device: where they live.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._entry_shape = (2, num_kv_heads, head_dim)
        self._num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.device = device
        self._groups: dict[int, _Group] = {}

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token over all layers."""
        values, heads, size = self._entry_shape
        return self._num_layers * values * heads * size * self.dtype.itemsize

    @property
    def num_open(self) -> int:
        """Open slots."""
        return sum(len(group.slots) for group in self._groups.values())

    @property
    def allocated_bytes(self) -> int:
        """Memory held, scratch and spare slots included."""
        return sum(g.entries.numel() * self.dtype.itemsize for g in self._groups.values())

    def new_entries(self, num_entries: int) -> Tensor:
        """Zeroed entries `[L, num_entries, 2, G, D]`: scratch must be finite, if never right."""
        shape = (self._num_layers, num_entries, *self._entry_shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def open(self, num_tokens: int) -> Slot:
        """An empty slot with room for `num_tokens`; it stays valid until it is closed."""
        group = self._group_for(num_tokens)
        slot = Slot(group, 0)
        group.add(slot)
        group.clear(slot)
        return slot

    def close(self, slot: Slot) -> None:
        """Give a slot back. Other slots may move within their group."""
        group = slot._group
        group.remove(slot)
        if not group.slots:
            del self._groups[group.capacity]

    def reserve(self, slot: Slot, num_tokens: int) -> None:
        """Make room for `num_tokens` beyond the slot's length; slots may move between groups."""
        needed = slot.length + num_tokens
        if needed <= slot.capacity:
            return
        old, old_place = slot._group, Slot(slot._group, slot.index)
        old_place.length = slot.length
        group = self._group_for(needed)
        group.add(slot)
        group.copy(old_place, slot.first_entry)
        old.slots[old_place.index] = old_place
        self.close(old_place)

    def layer_view(self, layer: int, slots: Sequence[Slot], num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[len(slots), G, num_keys, D]` of consecutive slots of one group."""
        group = slots[0]._group
        entries = group.entries[layer].unflatten(0, (-1, group.capacity))
        entries = entries[slots[0].index : slots[-1].index + 1, :num_keys]
        return entries[:, :, 0].transpose(1, 2), entries[:, :, 1].transpose(1, 2)

    def write(self, layer: int, slot: Slot, places: Tensor, keys_values: Tensor) -> None:
        """Store entries `[n, 2, G, D]` at flat places of the group that `slot` belongs to."""
        slot._group.entries[layer].index_copy_(0, places, keys_values)

    def commit(self, moves: Iterable[Move]) -> None:
        """Turn scratch entries into context: one gather of the tails per group, all layers."""
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        groups: dict[int, _Group] = {}
        for slot, offsets in moves:
            start = slot.first_entry + slot.length
            slot.length += len(offsets)
            assert slot.length <= slot.capacity, "a commit stays within what was reserved"
            sources, targets = by_group.setdefault(slot.capacity, ([], []))
            groups[slot.capacity] = slot._group
            for place, offset in enumerate(offsets):
                if place != offset:
                    sources.append(start + offset)
                    targets.append(start + place)
        for capacity, (sources, targets) in by_group.items():
            if sources:
                entries = groups[capacity].entries
                moved = entries[:, torch.tensor(sources, device=self.device)]
                entries.index_copy_(1, torch.tensor(targets, device=self.device), moved)

    def check(self) -> None:
        """Assert that every group's open slots are its first ones and within their capacity."""
        for capacity, group in self._groups.items():
            assert group.capacity == capacity
            assert group.slots, "an empty group is dropped"
            assert group.num_allocated >= len(group.slots)
            for index, slot in enumerate(group.slots):
                assert slot._group is group
                assert slot.index == index
                assert slot.length <= capacity

    def _group_for(self, num_tokens: int) -> _Group:
        largest = CAPACITIES[-1]
        beyond = -(-num_tokens // largest) * largest
        capacity = next((c for c in CAPACITIES if c >= num_tokens), beyond)
        if capacity not in self._groups:
            self._groups[capacity] = _Group(self, capacity)
        return self._groups[capacity]
