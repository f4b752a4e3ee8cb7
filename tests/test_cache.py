"""The KV cache against plain lists: what a row committed is what it reads, wherever it has moved."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.engine.attention import AttentionPlan, PassRow
from bastion_batch.engine.cache import CAPACITIES, PATIENCE, KVCache, Move, Slot
from bastion_batch.engine.memory import CacheFull, MemoryBudget

LAYERS, HEADS, SIZE = 3, 2, 2
CPU = torch.device("cpu")
proven = settings(derandomize=True, deadline=None, max_examples=20)


def new_cache() -> KVCache:
    return KVCache(LAYERS, HEADS, SIZE, torch.float64, CPU)


def entry(tag: int) -> torch.Tensor:
    """Keys and values of one token in all layers, `[L, 2, G, D]`, unlike any other token's."""
    places = torch.arange(LAYERS * 2 * HEADS * SIZE, dtype=torch.float64)
    return (tag + places / 64).view(LAYERS, 2, HEADS, SIZE)


@dataclass
class Reference:
    """One row as a list of tags, and what the cache says of it."""

    slot: Slot
    tags: list[int] = field(default_factory=list)

    def assert_stored_in(self, cache: KVCache) -> None:
        assert self.slot.length == len(self.tags)
        if not self.tags:
            return
        expected = torch.stack([entry(tag) for tag in self.tags], 1)
        for layer in range(LAYERS):
            keys, values = cache.layer_view(layer, [self.slot], len(self.tags))
            assert torch.equal(keys[0].transpose(0, 1), expected[layer, :, 0])
            assert torch.equal(values[0].transpose(0, 1), expected[layer, :, 1])


class Schedule:
    """Random operations on a cache and on its reference."""

    def __init__(self, seed: int) -> None:
        self.cache = new_cache()
        self.rows: list[Reference] = []
        self._random = np.random.default_rng(seed)
        self._next_tag = 1000

    def run(self, num_operations: int, max_rows: int = 12) -> None:
        for _ in range(num_operations):
            operation = self._random.choice(["open", "close", "pass", "pass", "pass"])
            if operation == "open" and len(self.rows) < max_rows:
                self.rows.append(Reference(self.cache.open(int(self._random.integers(1, 700)))))
            elif operation == "close" and self.rows:
                row = self.rows.pop(int(self._random.integers(len(self.rows))))
                self.cache.close(row.slot)
            elif self.rows:
                self._commit_a_pass()
            self.cache.check()
            assert self.cache.num_open == len(self.rows)
        for row in self.rows:
            row.assert_stored_in(self.cache)

    def _commit_a_pass(self) -> None:
        """Some rows get scratch tokens and keep an increasing choice of them, as of a tree."""
        count = int(self._random.integers(1, len(self.rows) + 1))
        chosen = [self.rows[i] for i in self._random.choice(len(self.rows), count, replace=False)]
        sizes = self._random.integers(1, 200, count)
        for row, size in zip(chosen, sizes, strict=True):
            self.cache.reserve(row.slot, int(size))
        moves = []
        for row, size in zip(chosen, sizes.tolist(), strict=True):
            tags = [self._next_tag + place for place in range(size)]
            self._next_tag += size
            self._write(row.slot, tags)
            kept = np.flatnonzero(self._random.random(size) < 0.5).tolist()
            moves.append(Move(row.slot, kept))
            row.tags += [tags[place] for place in kept]
        self.cache.commit(moves)

    def _write(self, slot: Slot, tags: list[int]) -> None:
        first = slot.first_entry + slot.length
        places = torch.arange(first, first + len(tags))
        entries = torch.stack([entry(tag) for tag in tags], 1)
        for layer in range(LAYERS):
            self.cache.write(layer, slot, places, entries[layer])


@proven
@given(st.integers(0, 2**32))
def test_any_schedule_keeps_every_rows_tokens(seed):
    Schedule(seed).run(40)


def test_a_long_schedule_keeps_every_rows_tokens():
    schedule = Schedule(7)
    for _ in range(6):
        schedule.run(50, max_rows=20)


def test_a_commit_keeps_the_path_and_drops_the_rest():
    cache = new_cache()
    slot = cache.open(10)
    for layer in range(LAYERS):
        cache.write(layer, slot, torch.arange(6), torch.stack([entry(t)[layer] for t in range(6)]))
    cache.commit([Move(slot, (0, 2, 5))])
    Reference(slot, [0, 2, 5]).assert_stored_in(cache)


def test_a_commit_beyond_what_was_reserved_is_refused():
    cache = new_cache()
    slot = cache.open(10)
    with pytest.raises(AssertionError, match="reserved"):
        cache.commit([Move(slot, range(slot.capacity + 1))])


def test_a_row_moves_only_when_it_outgrows_its_capacity():
    cache = new_cache()
    slot, other = cache.open(CAPACITIES[0]), cache.open(CAPACITIES[0])
    assert slot.capacity == CAPACITIES[0]
    cache.reserve(slot, CAPACITIES[0])
    assert slot.capacity == CAPACITIES[0], "exactly full"
    cache.reserve(slot, CAPACITIES[0] + 1)
    assert slot.capacity == CAPACITIES[1]
    assert (other.index, other.capacity) == (0, CAPACITIES[0])
    cache.check()


@pytest.mark.parametrize("num_tokens", [1, 256, 257, 8192, 8193, 16384, 20000])
def test_any_number_of_tokens_fits(num_tokens):
    cache = KVCache(1, 1, 1, torch.float32, CPU)
    slot = cache.open(num_tokens)
    assert num_tokens <= slot.capacity
    assert slot.capacity < 2 * max(num_tokens, 129)
    assert cache.allocated_bytes == slot.capacity * cache.bytes_per_token


def test_memory_follows_the_tokens_in_use():
    cache = new_cache()
    slots = [cache.open(200) for _ in range(16)]
    full = cache.allocated_bytes
    assert full == 16 * 256 * cache.bytes_per_token
    assert cache.bytes_per_token == LAYERS * 2 * HEADS * SIZE * 8
    for slot in slots[2:]:
        cache.close(slot)
    cache.trim()
    assert cache.allocated_bytes == full / 8
    for slot in slots[:2]:
        cache.close(slot)
    cache.trim()
    assert cache.allocated_bytes == 0
    assert cache.num_open == 0


def test_a_mostly_empty_group_gives_memory_back_after_a_while():
    cache = new_cache()
    slots = [cache.open(200) for _ in range(16)]
    full = cache.allocated_bytes
    for slot in slots[1:]:
        cache.close(slot)
    for number in range(4 * PATIENCE):
        assert number > PATIENCE - 1 or cache.allocated_bytes == full
        cache.close(cache.open(200))
    assert cache.allocated_bytes <= full / 4
    cache.check()


def test_rows_that_come_and_go_do_not_resize_a_group():
    """Neither at its brink nor one at a time, when it is empty in between."""
    cache = new_cache()
    for num_kept in (0, 4, 8):
        kept = [cache.open(200) for _ in range(num_kept)]
        cache.close(cache.open(200))
        held = cache.allocated_bytes
        for _ in range(PATIENCE):
            slots = [cache.open(200) for _ in range(1 + num_kept // 4)]
            for slot in slots:
                cache.close(slot)
            assert cache.allocated_bytes >= held
            held = cache.allocated_bytes
        for slot in kept:
            cache.close(slot)


def test_shared_tokens_are_a_copy():
    cache = new_cache()
    source = Reference(cache.open(300), [])
    source.tags = list(range(40))
    places = torch.arange(source.slot.first_entry, source.slot.first_entry + 40)
    for layer in range(LAYERS):
        cache.write(layer, source.slot, places, torch.stack([entry(t)[layer] for t in range(40)]))
    source.slot.length = 40
    other = Reference(cache.open(20), list(range(12)))
    cache.share(source.slot, other.slot, 12)
    other.assert_stored_in(cache)
    source.assert_stored_in(cache)
    cache.close(source.slot)
    other.assert_stored_in(cache)


# Budgets


def test_a_cache_without_room_says_so_and_stays_as_it_was():
    cache = new_cache()
    limit = 3 * 256 * cache.bytes_per_token
    budget = MemoryBudget(limit, [cache])
    slot = cache.open(100)
    with pytest.raises(CacheFull, match=f"{768 * cache.bytes_per_token} bytes.*{limit}"):
        cache.open(700)
    with pytest.raises(CacheFull):
        cache.reserve(slot, 700)
    cache.check()
    assert (slot.capacity, slot.index, cache.num_open) == (256, 0, 1)
    assert budget.held_bytes == 256 * cache.bytes_per_token
    cache.open(100)
    assert budget.held_bytes == 2 * 256 * cache.bytes_per_token


def test_a_full_group_grows_by_less_where_memory_is_short():
    """Old and new entries are held at once: 4 + 8 is too much, 4 + 6 is not, 6 + 7 is."""
    cache = new_cache()
    size = 256 * cache.bytes_per_token
    MemoryBudget(10 * size, [cache])
    for _ in range(6):
        cache.open(100)
    assert cache.allocated_bytes == 6 * size
    with pytest.raises(CacheFull):
        cache.open(100)
    cache.check()


def test_caches_with_one_budget_make_room_for_each_other():
    one, other = new_cache(), new_cache()
    budget = MemoryBudget(4 * 256 * one.bytes_per_token, [one, other])
    slots = [one.open(100) for _ in range(2)]
    for slot in slots:
        one.close(slot)
    assert budget.held_bytes > 0, "kept for the next rows"
    other.open(1000)
    assert one.allocated_bytes == 0
    assert budget.held_bytes == budget.limit_bytes
    with pytest.raises(CacheFull):
        one.open(1)


@proven
@given(st.integers(0, 2**32))
def test_no_schedule_breaks_a_budget(seed):
    schedule = Schedule(seed)
    budget = MemoryBudget(6_000 * schedule.cache.bytes_per_token, [schedule.cache])
    for _ in range(40):
        try:
            schedule.run(1)
        except CacheFull:
            schedule.cache.check()
        assert budget.held_bytes <= budget.limit_bytes
    for row in schedule.rows:
        row.assert_stored_in(schedule.cache)


def test_slots_are_reused_without_growth():
    cache = new_cache()
    random = np.random.default_rng(0)
    slots = [cache.open(100) for _ in range(8)]
    most = cache.allocated_bytes
    for _ in range(5_000):
        place = int(random.integers(8))
        cache.close(slots[place])
        slots[place] = cache.open(int(random.integers(1, 250)))
        assert cache.allocated_bytes <= most
    cache.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scratch_and_strangers_change_nothing(dtype):
    """Whatever finite values lie beyond a row's length and in other slots, attention ignores them.

    Finite is the contract: a masked NaN or infinity would still spoil a sum, which is why the
    entries of an open slot are.
    """
    generator = torch.Generator().manual_seed(0)

    def attended(poison: float) -> torch.Tensor:
        cache = KVCache(1, HEADS, SIZE, dtype, CPU)
        slots = [cache.open(300), cache.open(300), cache.open(300)]
        for slot, length in zip(slots, (5, 40, 0), strict=True):
            slot._group.entries[:, slot.first_entry : slot.first_entry + slot.capacity] = poison
            generator.manual_seed(length)
            context = torch.randn(length, 2, HEADS, SIZE, generator=generator, dtype=dtype)
            places = torch.arange(slot.first_entry, slot.first_entry + length)
            cache.write(0, slot, places, context)
            slot.length = length
        visible = np.tri(3, dtype=np.bool_)
        visible[2, 1] = False
        sizes = ((slots[0], 3, visible), (slots[1], 1, visible[:1, :1]), (slots[2], 2, None))
        plan = AttentionPlan(cache, [PassRow(*row) for row in sizes], 2 * HEADS)
        generator.manual_seed(99)
        return plan.attend(0, torch.randn(6, 4 * HEADS, SIZE, generator=generator, dtype=dtype))

    clean = attended(0.0)
    for poison in (1e30, -1e30, 12345.678):
        assert torch.equal(attended(poison), clean)


def test_an_open_slot_is_finite_whatever_its_place_held():
    """Opened, moved to a larger group, or moved into a closed slot's place."""
    cache = new_cache()
    for _ in range(30):
        slots = [cache.open(200) for _ in range(5)]
        for group in cache._groups.values():
            group.entries[:, len(group.slots) * group.capacity :] = torch.nan
        cache.reserve(slots[1], 300)
        cache.reserve(slots[3], 300)
        closed = slots.pop(0)
        first = closed.first_entry
        closed._group.entries[:, first : first + closed.capacity] = torch.nan
        cache.close(closed)
        for slot in slots:
            stored = slot._group.entries[:, slot.first_entry : slot.first_entry + slot.capacity]
            assert torch.isfinite(stored).all()
        for slot in slots:
            cache.close(slot)
