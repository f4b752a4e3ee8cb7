"""The KV cache: contiguous and growing per row, rows of similar capacity side by side.

A `Slot` is one row's place. Slots of equal capacity share a group, one tensor for all layers, in
which the open slots are always the first ones: a pass over a group reads a plain slice of it and
nothing is gathered. A row that outgrows its capacity moves to the next group; a closed slot is
filled by the group's last one. Only `Slot.length` says which entries are valid: what lies beyond
is scratch space that a pass may fill with nodes and a commit turns into context. Scratch of an
open slot is finite, whatever the place's last tenant left: a masked NaN would spoil a sum.

A group grows by doubling and gives memory back only after it has been mostly empty for a while,
so that rows that come and go do not make it grow and shrink in turn. A `MemoryBudget` bounds what
caches hold; growing beyond it raises `CacheFull` and changes nothing.

Shape letters: L layers, S slots of a group, C capacity in tokens, 2 keys and values, G key-value
heads, D head size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine import huge_pages
from bastion_batch.engine.memory import CacheFull, MemoryBudget
from bastion_batch.engine.transfer import to_device

CAPACITIES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Capacities in tokens; beyond the last, multiples of it."""

GROWTHS = (1.0, 0.5, 0.125)
"""Slots a full group adds, as shares of what it has; the next one where memory is short."""

PATIENCE = 64
"""Slots opened while a group was at most a quarter full, before it gives memory back."""


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
        self.num_idle = 0
        """Slots opened in the cache since this group was more than a quarter full."""

    @property
    def num_allocated(self) -> int:
        return self.entries.shape[1] // self.capacity

    @property
    def is_mostly_empty(self) -> bool:
        return len(self.slots) <= self.num_allocated // 4

    def add(self, slot: Slot) -> None:
        """Place a slot after the others, its entries zeroed."""
        if len(self.slots) == self.num_allocated:
            self._grow()
        slot._group, slot.index = self, len(self.slots)
        self.slots.append(slot)
        self.entries[:, slot.first_entry : slot.first_entry + self.capacity].zero_()

    def remove(self, slot: Slot) -> None:
        """Let the last slot fill the place, scratch and all."""
        last = self.slots.pop()
        if last is not slot:
            self.copy(last, self.capacity, slot.first_entry)
            last.index = slot.index
            self.slots[last.index] = last

    def copy(self, source: Slot, num_tokens: int, first_entry: int) -> None:
        """Copy the first tokens of a slot, of this or another group, to an entry of this one."""
        start = source.first_entry
        target = self.entries[:, first_entry : first_entry + num_tokens]
        target.copy_(source._group.entries[:, start : start + num_tokens])

    def resize(self, num_slots: int) -> None:
        """Hold so many slots; for a moment old and new entries are both held."""
        used = len(self.slots) * self.capacity
        entries = self.cache.new_entries(num_slots * self.capacity)
        entries[:, :used] = self.entries[:, :used]
        self.entries = entries

    def _grow(self) -> None:
        count = self.num_allocated
        for growth in GROWTHS:
            larger = count + int(growth * count)
            if larger > count and self.cache.has_room(larger * self.capacity):
                return self.resize(larger)
        return self.resize(count + 1)


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
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.budget: MemoryBudget | None = None
        """What the cache may hold, others included; None: whatever the device has."""
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

    def has_room(self, num_entries: int) -> bool:
        """Whether so many more entries may be held."""
        return self.budget is None or self.budget.allows(num_entries * self.bytes_per_token)

    def new_entries(self, num_entries: int) -> Tensor:
        """Entries `[L, num_entries, 2, G, D]` that hold anything: a slot's are zeroed as it opens.

        Raises:
            CacheFull: the budget or the device has no room for them.
        """
        shape = (self._num_layers, num_entries, *self._entry_shape)
        if num_entries and not self.has_room(num_entries):
            raise CacheFull(self._shortage(num_entries))
        try:
            return huge_pages.empty(shape, self.dtype, self.device)
        except torch.OutOfMemoryError:
            raise CacheFull(self._shortage(num_entries)) from None

    def open(self, num_tokens: int) -> Slot:
        """An empty slot with room for `num_tokens`; it stays valid until it is closed.

        Raises:
            CacheFull: there is no room for it.
        """
        group = self._group_for(num_tokens)
        slot = Slot(group, len(group.slots))
        self._place(slot, group)
        self._count_idleness()
        return slot

    def close(self, slot: Slot) -> None:
        """Give a slot back. Other slots may move within their group."""
        slot._group.remove(slot)

    def reserve(self, slot: Slot, num_tokens: int) -> None:
        """Make room for `num_tokens` beyond the slot's length; slots may move between groups.

        Raises:
            CacheFull: there is no room; the slot is as it was.
        """
        needed = slot.length + num_tokens
        if needed <= slot.capacity:
            return
        old_place = Slot(slot._group, slot.index)
        group = self._group_for(needed)
        self._place(slot, group)
        group.copy(old_place, slot.length, slot.first_entry)
        old_place._group.slots[old_place.index] = old_place
        self.close(old_place)

    def share(self, source: Slot, slot: Slot, num_tokens: int) -> None:
        """Make the first tokens of one slot the whole context of another, which has room."""
        assert num_tokens <= min(source.length, slot.capacity)
        slot._group.copy(source, num_tokens, slot.first_entry)
        slot.length = num_tokens

    def trim(self) -> None:
        """Give back what no slot uses, as far as there is room to copy what one does."""
        for capacity, group in list(self._groups.items()):
            used = len(group.slots)
            if not used:
                del self._groups[capacity]
            elif used < group.num_allocated and self._may_copy(used * capacity):
                group.resize(used)

    def layer_view(self, layer: int, slots: Sequence[Slot], num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[len(slots), G, num_keys, D]` of consecutive slots of one group."""
        group = slots[0]._group
        entries = group.entries[layer].unflatten(0, (-1, group.capacity))
        entries = entries[slots[0].index : slots[-1].index + 1, :num_keys]
        return entries[:, :, 0].transpose(1, 2), entries[:, :, 1].transpose(1, 2)

    def entries_of(self, slot: Slot) -> Tensor:
        """All entries `[L, N, 2, G, D]` of the group that `slot` belongs to, until it changes."""
        return slot._group.entries

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
                moved = entries[:, to_device(np.array(sources), self.device)]
                entries.index_copy_(1, to_device(np.array(targets), self.device), moved)

    def check(self) -> None:
        """Assert that every group's open slots are its first ones and within their capacity."""
        for capacity, group in self._groups.items():
            assert group.capacity == capacity
            assert group.num_allocated >= max(1, len(group.slots))
            assert len(set(map(id, group.slots))) == len(group.slots)
            for index, slot in enumerate(group.slots):
                assert slot._group is group
                assert slot.index == index
                assert 0 <= slot.length <= capacity

    def _group_for(self, num_tokens: int) -> _Group:
        capacity = capacity_for(num_tokens)
        return self._groups.get(capacity) or _Group(self, capacity)

    def _place(self, slot: Slot, group: _Group) -> None:
        """Put a slot into a group, and keep the group if it is new and had room."""
        group.add(slot)
        self._groups[group.capacity] = group

    def _count_idleness(self) -> None:
        for capacity, group in list(self._groups.items()):
            group.num_idle = group.num_idle + 1 if group.is_mostly_empty else 0
            if group.num_idle <= PATIENCE:
                continue
            group.num_idle = 0
            if not group.slots:
                del self._groups[capacity]
            elif self._may_copy(group.num_allocated // 2 * capacity):
                group.resize(group.num_allocated // 2)

    def _may_copy(self, num_entries: int) -> bool:
        budget = self.budget
        return budget is None or (
            budget.held_bytes + num_entries * self.bytes_per_token <= budget.limit_bytes
        )

    def _shortage(self, num_entries: int) -> str:
        needed = num_entries * self.bytes_per_token
        if self.budget is None:
            return f"the cache needs {needed} bytes more than it holds, and the device is full"
        return (
            f"the cache needs {needed} bytes beside the {self.budget.held_bytes} held; "
            f"the limit is {self.budget.limit_bytes}"
        )


def capacity_for(num_tokens: int) -> int:
    """Tokens of the smallest slot that holds so many."""
    largest = CAPACITIES[-1]
    beyond = -(-num_tokens // largest) * largest
    return next((c for c in CAPACITIES if c >= num_tokens), beyond)
