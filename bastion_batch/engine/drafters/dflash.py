"""DFlash block-diffusion drafters (arXiv 2602.06036), whatever packaging they came in.

One pass fills a block: slot 0 is the last committed token, the other slots are masked. Every layer
attends to keys and values projected from the target's taps of the context, and to the block, as the
layer's description says. Only those context entries are ever kept; a block's own entries saw masks
and stay scratch.

Shape letters: R rows, W block width, D depth, K ranks, S packed tokens, E hidden size, T taps.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.attention import Attends, StorePlan, pass_order
from bastion_batch.engine.buckets import product_bucket_for
from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.blocks import BlockAttention
from bastion_batch.engine.drafters.context import ContextHeads
from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.dflash_files import (
    drafter_dtype,
    rope_config,
    stack_config,
)
from bastion_batch.engine.drafters.head import BestIds, DraftHead
from bastion_batch.engine.drafters.pending import PendingTaps, in_batches
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device, to_host
from bastion_batch.engine.transformer import DecoderStack, Layer, Rotary, layer_tensors

NUM_RANKS = 32
"""K: candidates kept per position. A tree of 512 nodes seldom asks for more at one position."""

PROJECTED_TOKENS = 256
"""About how many context tokens are projected together: more are no faster, fewer take longer each,
and a backlog of many rows neither holds up a step for long nor needs memory for all its tokens."""

OLDEST_TOKENS = 64
"""Projected of a row whose places are full; it may end before the others are needed."""


class Blocks(NamedTuple):
    """What a pass computed: the outputs of all slots of the rows' blocks."""

    hidden_SE: Tensor
    """After the final norm, block after block, `[R * W, E]`."""
    order: list[int]
    """The row of every block: blocks lie as their slots of the cache do."""


class Drafted(NamedTuple):
    """The best ids of the slots that were wanted."""

    wanted_RD: NDArray[np.bool_]
    """Row after row in the order of the pass; what follows has an entry for each that is true."""
    hidden_SE: Tensor
    best: BestIds
    anchors_RE: Tensor | None
    """The outputs of the slots of all anchors, in the order of the pass, where they were wanted."""
    order: list[int]
    """The row of every block."""


class DFlashDrafter:
    """A DFlash checkpoint bound to its target.

    Args:
        description: what the checkpoint is; it must fit the target (`require_fit`).
        tensors: its weights under their normalised names, as `dflash_files.prepared` leaves them.
        target: what it drafts for, and whose embedding and head it uses if it has none.
    """

    def __init__(
        self, description: DrafterDescription, tensors: Mapping[str, Tensor], target: Target
    ) -> None:
        dtype = drafter_dtype(target.dtype)
        config = stack_config(description)
        self._target = target
        layers = [
            Layer.of(layer_tensors(tensors, f"layers.{number}."), config)
            for number in range(config.num_layers)
        ]
        rotary = Rotary(rope_config(description), dtype, target.device)
        self._stack = DecoderStack(config, layers, tensors["norm.weight"], rotary)
        self._context_heads = ContextHeads(tensors, config)
        self._fuse = Linear(tensors["fc.weight"])
        self._fuse_norm = tensors["hidden_norm.weight"]
        self._embedding = tensors.get("embed_tokens.weight", target.embedding)
        self._own_head = tensors.get("lm_head.weight")
        self._dtype = dtype
        self._bucket = product_bucket_for(target.device, dtype)
        self._num_ranks = NUM_RANKS
        self._start(description)

    def _start(self, description: DrafterDescription) -> None:
        """Begin without rows, under a description of the sizes of the weights."""
        self.description = description
        self.depth = description.depth
        self.taps = description.taps
        self.head = DraftHead(description, self._target, self._own_head)
        self._width = description.block_width
        config, device = self._stack.config, self._target.device
        self._cache = KVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, self._dtype, device
        )
        self.caches: tuple[KVCache, ...] = (self._cache,)
        self._attention = BlockAttention(description, self._cache)
        self._slots: dict[int, Slot] = {}
        self._pending = PendingTaps(self._fuse.in_features, self._dtype, device)

    def reread(self, description: DrafterDescription) -> Self:
        """The same weights under another description of the same sizes, without any rows."""
        other = copy(self)
        other._start(description)
        return other

    @property
    def shape(self) -> ModelShape:
        """What a draft pass costs."""
        return self._stack.config.shape(self.head.num_rows, self._dtype)

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of one context token in the drafter's cache."""
        return self._cache.bytes_per_token

    @property
    def pending_bytes_per_row(self) -> int:
        """Memory of what waits to be projected, whether or not anything does."""
        return self._pending.bytes_per_row

    def reserve(self, key: int, num_tokens: int) -> None:
        """Make room for so many more context tokens of a row, and for its block after them."""
        num_tokens += self._pending.num_tokens(key) + self._width
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = self._cache.open(num_tokens)
        else:
            self._cache.reserve(slot, num_tokens)

    def share(self, source_key: int, key: int, num_tokens: int) -> None:
        """Copy the first context tokens of one row to another, newly reserved."""
        source = self._slots[source_key]
        self._project_oldest({source_key: max(0, num_tokens - source.length)})
        self._cache.share(source, self._slots[key], num_tokens)

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Put the taps of new context tokens by until `catch_up`, where there is room for them."""
        features_SF = features_SF.to(self._dtype)
        for key, count in zip(keys, counts, strict=True):
            self.reserve(key, count)
        if all(map(self._pending.has_room, keys, counts)):
            self._pending.put(keys, counts, features_SF)
            return
        self._make_room(keys, counts)
        parts = list(zip(keys, counts, features_SF.split(list(counts)), strict=True))
        short = [part for part in parts if self._pending.has_room(*part[:2])]
        for key, count, features in parts:
            if not self._pending.has_room(key, count):
                self._project([key], [count], features)
        if short:
            keys, counts, features = zip(*short, strict=True)
            self._pending.put(keys, counts, torch.cat(features))

    def narrow(self, num_ids: int) -> None:
        """Score only the token ids below this from now on."""
        self.head.narrow(num_ids)

    def num_pending(self, key: int) -> int:
        """Context tokens of a row that `catch_up` has yet to project."""
        return self._pending.num_tokens(key)

    def catch_up(self, keys: Sequence[int]) -> None:
        """Project what was put by for some rows."""
        self._project_oldest({key: self._pending.num_tokens(key) for key in keys})

    def _make_room(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Project the oldest tokens of the rows that have no room for so many more.

        And of those that soon would have none: few large projections are less work than many.
        """
        pending, oldest = self._pending, {}
        for key, count in zip(keys, counts, strict=True):
            if not pending.has_room(key, count - OLDEST_TOKENS):
                oldest[key] = pending.num_tokens(key)
            elif not pending.has_room(key, count + OLDEST_TOKENS // 2):
                oldest[key] = min(OLDEST_TOKENS, pending.num_tokens(key))
        self._project_oldest(oldest)

    def _project_oldest(self, counts: Mapping[int, int]) -> None:
        """Project so many of the oldest tokens that were put by for some rows."""
        for together in in_batches(counts, PROJECTED_TOKENS):
            self._project(list(together), *self._pending.take(together, self._bucket))

    def _project(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Fill every layer's keys and values of the next context tokens of some rows.

        The features may be followed by padding, up to the bucket's size.
        """
        slots = [self._slots[key] for key in keys]
        starts = [slot.length for slot in slots]
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        )
        plan = StorePlan(self._cache, slots, counts)
        num_tokens = self._bucket(len(positions))
        positions = np.pad(positions, (0, num_tokens - len(positions)))
        if len(features_SF) < num_tokens:
            features_SF = F.pad(features_SF, (0, 0, 0, num_tokens - len(features_SF)))
        fused = self._stack.norm(self._fuse(features_SF), self._fuse_norm)
        at = to_device(positions, self._target.device)
        cos, sin = self._stack.rotary.at(at, int(positions.max()))
        for number, keys_values in enumerate(self._context_heads(fused, cos, sin)):
            plan.store(number, keys_values)
        for slot, count in zip(slots, counts, strict=True):
            slot.length += count

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One pass over all rows' blocks, every row at its own context length and depth."""
        return self.marginals(self.drafted(rows))

    def drafted(self, rows: Sequence[DraftRow], *, with_anchors: bool = False) -> Drafted:
        """The best ids of the slots the rows want, from one pass.

        Only those slots go through the end of the last layer and the head, which is most of a pass.
        """
        order = self._order(rows)
        wanted_RD = np.arange(self.depth) < np.array([rows[p].depth for p in order])[:, None]
        first = self.description.first_prediction_slot
        slots_RW = np.arange(len(rows) * self._width).reshape(len(rows), self._width)
        wanted_N = slots_RW[:, first : first + self.depth][wanted_RD]
        num_slots = len(wanted_N)
        if with_anchors:
            wanted_N = np.concatenate([wanted_N, slots_RW[:, 0]])
        num_padding = self._bucket(len(wanted_N)) - len(wanted_N)
        outputs_NE = self._outputs(rows, order, np.pad(wanted_N, (0, num_padding), mode="edge"))
        hidden_SE = outputs_NE[:num_slots]
        anchors_RE = outputs_NE[num_slots : num_slots + len(rows)] if with_anchors else None
        best = self.head.best(hidden_SE, self._num_ranks)
        return Drafted(wanted_RD, hidden_SE, best, anchors_RE, order)

    def blocks(self, rows: Sequence[DraftRow]) -> Blocks:
        """One pass over all rows' blocks."""
        order = self._order(rows)
        return Blocks(self._outputs(rows, order), order)

    def _order(self, rows: Sequence[DraftRow]) -> list[int]:
        """Places of the rows in the order in which their blocks enter a pass."""
        return pass_order([self._slots[row.key] for row in rows], [False] * len(rows))

    def _outputs(
        self,
        rows: Sequence[DraftRow],
        order: Sequence[int],
        wanted_N: NDArray[np.integer] | None = None,
    ) -> Tensor:
        """Outputs of all slots of the rows' blocks in this order, or of those that are wanted."""
        self.catch_up([row.key for row in rows])
        slots = [self._slots[rows[place].key] for place in order]
        for place, slot in zip(order, slots, strict=True):
            assert slot.length == len(rows[place].token_ids) - 1, "the drafter lags its row"
        blocks = np.full((len(rows), self._width), self.description.mask_token_id)
        blocks[:, 0] = [rows[place].token_ids[-1] for place in order]
        positions = np.array([slot.length for slot in slots])[:, None] + np.arange(self._width)
        device = self._target.device
        hidden = F.embedding(to_device(blocks.ravel(), device), self._embedding).to(self._dtype)
        if self.description.embedding_scale != 1:
            hidden = hidden * self.description.embedding_scale
        at = to_device(positions.ravel(), device)
        plan = self._attention.plan(slots)
        wanted = None if wanted_N is None else to_device(wanted_N, device)
        return self._forward(hidden, at, int(positions.max()), plan, wanted)

    def block_logits(self, rows: Sequence[DraftRow], num_slots: int | None = None) -> Tensor:
        """Logits `[R, W, U]` of every slot of every row's block, in the order of the rows.

        With `num_slots` only of the first ones: the head is most of the work.
        """
        hidden_SE, order = self.blocks(rows)
        back = to_device(np.argsort(order), hidden_SE.device)
        wanted_RWE = hidden_SE.unflatten(0, (len(order), -1))[back, :num_slots]
        return self.head.logits(wanted_RWE.flatten(0, 1)).unflatten(0, (len(order), -1))

    def marginals(self, drafted: Drafted) -> Marginals:
        """What was drafted, in the caller's order of rows."""
        best = drafted.best
        return self.arranged(drafted, *to_host(best.log_probs_SK, best.target_ids_SK))

    def arranged(
        self, drafted: Drafted, log_probs_SK: NDArray[np.floating], ids_SK: NDArray[np.int64]
    ) -> Marginals:
        """What was drafted, once it is on the host."""
        wanted_RD, order = drafted.wanted_RD, drafted.order
        shape = (*wanted_RD.shape, log_probs_SK.shape[1])
        log_probs_RDK = np.full(shape, -np.inf, log_probs_SK.dtype)
        token_ids_RDK = np.zeros(shape, ids_SK.dtype)
        log_probs_RDK[wanted_RD], token_ids_RDK[wanted_RD] = log_probs_SK, ids_SK
        back = np.argsort(order)
        return Marginals(log_probs_RDK[back], token_ids_RDK[back])

    def forget(self, key: int) -> None:
        """Close the row's slot."""
        self._pending.drop(key)
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._cache.close(slot)

    def _forward(
        self,
        hidden_SE: Tensor,
        positions_S: Tensor,
        max_position: int,
        plan: Attends,
        wanted_N: Tensor | None,
    ) -> Tensor:
        """Outputs of the layers after the final norm, for packed blocks: of the wanted slots."""
        out = self._stack.forward(hidden_SE, positions_S, max_position, plan, wanted_N=wanted_N)
        return out.hidden_SE
