"""Packed attention against one token at a time, for every mix of trees, chunks and blocks."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.tree import DraftTree
from bastion_batch.engine import row_attention
from bastion_batch.engine.attention import AttentionPlan, PassRow, StorePlan, pass_order
from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.exponentials import exponential, exponentials, largest_of
from bastion_batch.engine.team import Team, _starter
from bastion_batch.engine.vectors import LANES

LAYERS, KV_HEADS = 2, 2
SIZE = 32
"""Of a head, where a test does not say: the least that the loops take."""
TOLERANCES = {  # of the rounded result
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 4e-3},  # torch rounds the weights as well
}
any_dtype = st.sampled_from([*TOLERANCES])
"""In float64 the library attends; otherwise rows with few tokens are attended to by our own loop."""
proven = settings(derandomize=True, deadline=None, max_examples=30)


class Share(NamedTuple):
    """What one row brings: so many tokens of context, and what its new tokens see."""

    kind: str
    context: int
    num_tokens: int
    reserved: int


def share(kind: str, context: int, num_tokens: int, reserved: int = 0) -> Share:
    return Share(kind, context, 1 if kind == "root" else num_tokens, reserved)


shares = st.builds(
    share,
    st.sampled_from(["root", "tree", "block", "chunk"]),
    st.sampled_from([0, 1, 3, 17, 40, 250, 256, 300, 1100]),
    st.integers(1, 12),
    st.sampled_from([0, 0, 300, 700]),
)


def visible_of(part: Share, random: np.random.Generator) -> NDArray[np.bool_] | None:
    if part.kind == "chunk":
        return None
    if part.kind == "block":
        return np.ones((part.num_tokens, part.num_tokens), np.bool_)
    parents = [-1, *(int(random.integers(0, node)) for node in range(1, part.num_tokens))]
    return DraftTree(parents, [0] * part.num_tokens, [0] * part.num_tokens).ancestors_NN()


def slow_attention(
    query_HD: Tensor, keys: list[Tensor], values: list[Tensor], num_q_heads: int
) -> Tensor:
    """One token, one head at a time: softmax of scores over the visible keys `[G, D]`."""
    group = num_q_heads // KV_HEADS
    heads = []
    for head in range(num_q_heads):
        own_keys = [key[head // group] for key in keys]
        scores = torch.stack([query_HD[head] @ key for key in own_keys]) / query_HD.shape[1] ** 0.5
        weights = torch.exp(scores - scores.max())
        weights /= weights.sum()
        heads.append(sum(w * v[head // group] for w, v in zip(weights, values, strict=True)))
    return torch.cat(heads)


class Batch:
    """Rows with random contexts in a cache, and the same as plain tensors."""

    def __init__(
        self,
        parts: list[Share],
        seed: int,
        dtype: torch.dtype = torch.float64,
        size: int = SIZE,
    ) -> None:
        self.dtype = dtype
        self.size = size
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(LAYERS, KV_HEADS, size, dtype, torch.device("cpu"))
        self.parts = parts
        self.slots = [self.cache.open(max(1, part.reserved)) for part in parts]
        self.contexts = [self.normal(LAYERS, part.context, 2, KV_HEADS, size) for part in parts]
        for slot, part in zip(self.slots, parts, strict=True):
            self.cache.reserve(slot, part.context + part.num_tokens)
        told = [row for row, part in enumerate(parts) if part.context]
        plan = StorePlan(
            self.cache, [self.slots[row] for row in told], [parts[row].context for row in told]
        )
        for layer in range(LAYERS if told else 0):
            plan.store(layer, torch.cat([self.contexts[row][layer] for row in told]))
        for slot, part in zip(self.slots, parts, strict=True):
            slot.length = part.context
        self.visible = [visible_of(part, self.random) for part in parts]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def assert_attends(self, num_q_heads: int) -> None:
        order = pass_order(self.slots, [part.kind == "chunk" for part in self.parts])
        assert sorted(order) == list(range(len(self.parts)))
        rows = [PassRow(self.slots[i], self.parts[i].num_tokens, self.visible[i]) for i in order]
        plan = AttentionPlan(self.cache, rows, num_q_heads)
        for layer in range(LAYERS):
            queries = [self.normal(part.num_tokens, num_q_heads, self.size) for part in self.parts]
            own = [self.normal(part.num_tokens, 2, KV_HEADS, self.size) for part in self.parts]
            packed = [torch.cat([tensors[i] for i in order]) for tensors in (queries, own)]
            heads = torch.cat([packed[0], packed[1].flatten(1, 2)], 1)
            found = plan.attend(layer, heads)
            expected = torch.cat([self._expected(i, layer, queries[i], own[i]) for i in order])
            torch.testing.assert_close(found.double(), expected, **TOLERANCES[self.dtype])

    def _expected(self, row: int, layer: int, queries: Tensor, own: Tensor) -> Tensor:
        visible = self.visible[row]
        if visible is None:
            visible = np.tri(len(queries), dtype=np.bool_)
        queries, own = queries.double(), own.double()
        context = list(self.contexts[row][layer].double())
        outputs = []
        for token, query in enumerate(queries):
            seen = [*context, *(own[i] for i in np.flatnonzero(visible[token]))]
            keys, values = [kv[0] for kv in seen], [kv[1] for kv in seen]
            outputs.append(slow_attention(query, keys, values, queries.shape[1]))
        return torch.stack(outputs)


@proven
@given(
    st.lists(shares, min_size=1, max_size=5),
    st.sampled_from([2, 6]),
    st.integers(0, 1000),
    any_dtype,
)
def test_every_mix_attends_as_one_token_at_a_time(parts, num_q_heads, seed, dtype):
    Batch(parts, seed, dtype).assert_attends(num_q_heads)


MIXES = {
    "single roots, ragged": [share("root", c, 1) for c in (0, 1, 9, 255)],
    "single roots, level": [share("root", 30, 1) for _ in range(3)],
    "blocks, level": [share("block", 30, 6) for _ in range(3)],
    "blocks, ragged": [share("block", c, 6) for c in (0, 30, 31, 250)],
    "trees of unequal size": [share("tree", 20, n) for n in (1, 12, 2, 7)],
    "three capacities": [share("tree", c, 4) for c in (10, 255, 500, 20, 300)],
    "a chunk beside a tree": [share("tree", 9, 3), share("chunk", 0, 12), share("chunk", 8, 1)],
    "chunks only": [share("chunk", 0, 5), share("chunk", 12, 5), share("chunk", 300, 2)],
    "from nothing": [share("root", 0, 1)],
    "few tokens between many": [
        share("tree", c, n) for c, n in ((9, 30), (70, 3), (5, 40), (8, 1))
    ],
    "trees after contexts in parts": [
        share("tree", c, n) for c, n in ((250, 9), (505, 12), (260, 1), (1500, 3), (40, 5))
    ],
    "a batch of roots": [share("root", 5 * i, 1) for i in range(20)],
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MIXES)
def test_chosen_mixes_attend_as_one_token_at_a_time(name, dtype):
    Batch(MIXES[name], seed=3, dtype=dtype).assert_attends(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_heads_of_any_size_attend_as_one_token_at_a_time(size, dtype):
    parts = [share("tree", c, n) for c, n in ((250, 9), (505, 12), (260, 1), (40, 5), (0, 2))]
    Batch(parts, seed=5, dtype=dtype, size=size).assert_attends(6)


def test_exponentials_are_as_good_as_the_librarys():
    x = np.linspace(-87, 0, 100_000, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(np.array([_exponential(value) for value in x]) / exact - 1).max() < 3e-7
    padded = np.full(100_000 // LANES * LANES, -1e30, np.float32)
    padded[: len(x)] = x[: len(padded)]
    total = _exponentials(padded, np.float32(0))
    assert np.abs(padded / exact[: len(padded)] - 1).max() < 3e-7
    assert total == pytest.approx(exact[: len(padded)].sum(), rel=1e-5)
    assert np.isnan(_exponential(np.float32("nan")))
    assert _exponential(np.float32("-inf")) == _exponential(np.float32(-87))


def test_the_largest_is_found_in_any_lane():
    for place in range(2 * LANES):
        scores = np.full(2 * LANES, -5, np.float32)
        scores[place] = 3
        assert _largest(scores) == 3


@njit
def _exponential(x):
    return exponential(x)


@njit
def _exponentials(scores, most):
    return exponentials(scores.ctypes.data, len(scores) // LANES, most)


@njit
def _largest(scores):
    return largest_of(scores.ctypes.data, len(scores) // LANES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 1], ids=["short", "long"])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_the_number_of_threads_changes_nothing(monkeypatch, num_rows, first, dtype):
    """Nor do the rows beside it: to the last bit."""
    outputs = []
    for threads in (1, 2, 5):
        team = Team(threads, _starter())
        monkeypatch.setattr(row_attention, "torchs_team", lambda team=team: team)
        contexts = [(40, 700, 250, 510, 90)[i % 5] for i in range(first, first + num_rows)]
        batch = Batch([share("tree", context, 9) for context in contexts], seed=2, dtype=dtype)
        rows = [PassRow(s, 9, v) for s, v in zip(batch.slots, batch.visible, strict=True)]
        plan = AttentionPlan(batch.cache, rows, 6)
        heads = batch.normal(9 * num_rows, 6 + 2 * KV_HEADS, SIZE)
        outputs.append(plan.attend(1, heads))
        alone = AttentionPlan(batch.cache, rows[:1], 6).attend(1, heads[:9])
        assert torch.equal(alone, outputs[-1][:9])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_units_cover_every_pair_of_every_head_once(num_threads):
    sizes, contexts = np.array([1, 9, 2, 16, 1, 3]), np.array([50, 900, 20, 400, 700, 100])
    for count in range(1, 7):
        seen = np.zeros((count, 3, 16, 1000), int)
        num_keys = (sizes + contexts)[:count]
        parts = row_attention._num_parts(num_keys)
        for row, part, key, last_key, head, last_head, start, stop in row_attention._divided(
            sizes[:count], contexts[:count], parts, 3, num_threads
        ):
            assert start < stop
            assert 0 <= part < parts[row]
            assert last_key - key <= row_attention.PART_KEYS
            seen[row, head:last_head, start:stop, key:last_key] += 1
        is_token = np.arange(16) < sizes[:count, None]
        is_key = np.arange(1000) < num_keys[:, None]
        assert (seen == (is_token[:, :, None] & is_key[:, None])[:, None]).all()


def test_torchs_threads_are_found():
    """Without them the loop runs on one core, which is a loss that nobody would notice."""
    assert _starter()


def test_slots_moved_by_closing_others_attend_as_before():
    batch = Batch([share("tree", 20 + i, 4) for i in range(6)], seed=5)
    for row in (4, 0):
        batch.cache.close(batch.slots[row])
        for rows in (batch.slots, batch.parts, batch.contexts, batch.visible):
            del rows[row]
    batch.assert_attends(6)


def test_a_stored_sequence_lands_after_each_rows_context():
    """Several capacities and counts; nothing before or after is touched."""
    batch = Batch([share("block", c, 6) for c in (5, 300, 0, 12)], seed=1)
    counts = [3, 1, 6, 2]
    new = batch.normal(LAYERS, sum(counts), 2, KV_HEADS, SIZE)
    before = [slot._group.entries.clone() for slot in batch.slots]
    plan = StorePlan(batch.cache, batch.slots, counts)
    for layer in range(LAYERS):
        plan.store(layer, new[layer])
    starts = np.cumsum([0, *counts])
    touched: dict[int, set[int]] = {}
    for slot, count, start in zip(batch.slots, counts, starts, strict=False):
        first = slot.first_entry + slot.length
        stored = slot._group.entries[:, first : first + count]
        assert torch.equal(stored, new[:, start : start + count])
        touched.setdefault(slot.capacity, set()).update(range(first, first + count))
    for slot, old in zip(batch.slots, before, strict=True):
        rest = [i for i in range(old.shape[1]) if i not in touched[slot.capacity]]
        assert torch.equal(slot._group.entries[:, rest], old[:, rest])


def test_a_row_may_store_nothing():
    batch = Batch([share("block", c, 6) for c in (5, 300)], seed=1)
    plan = StorePlan(batch.cache, batch.slots, [2, 0])
    before = batch.slots[1]._group.entries.clone()
    plan.store(0, batch.normal(2, 2, KV_HEADS, SIZE))
    assert torch.equal(batch.slots[1]._group.entries, before)


def test_attention_work_is_near_what_the_rows_need():
    """Within 1.3 x sum s_r (c_r + s_r), whatever one row's tree is."""
    parts = [share("tree", 100, 64), *(share("root", 100, 1) for _ in range(15))]
    batch = Batch(parts, seed=0)
    order = pass_order(batch.slots, [False] * 16)
    rows = [PassRow(batch.slots[i], parts[i].num_tokens, batch.visible[i]) for i in order]
    plan = AttentionPlan(batch.cache, rows, 6)
    done = 0
    for group in plan._batches:
        padded = (group.stop - group.start) if group.pad_BT is None else len(group.pad_BT)
        done += padded * group.num_keys
    needed = sum(part.num_tokens * (part.context + part.num_tokens) for part in parts)
    assert done <= 1.3 * needed, f"{done / needed:.1f} times the work"
