"""DFlash block-diffusion drafter (arXiv 2602.06036), z-lab's checkpoint format.

One pass fills a block: slot 0 is the last committed token, the other slots are masked and predict
their own position. Every layer attends to keys and values projected from the target's taps of the
context, and to the whole block. Only those context entries are ever kept; a block's own entries
saw masks and stay scratch.

Shape letters: R rows, W block width, D = W - 1 depth, K ranks, S packed tokens, E hidden size,
T taps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.attention import AttentionPlan, PassRow, StorePlan, pass_order
from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.dflash_files import (
    block_options,
    read_config,
    require_tensors,
)
from bastion_batch.engine.drafters.pending import PendingTaps
from bastion_batch.engine.drafters.ranking import best_tokens
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device
from bastion_batch.engine.transformer import (
    DecoderStack,
    Layer,
    Rotary,
    StackConfig,
    layer_tensors,
)
from bastion_batch.errors import ModelError

NUM_RANKS = 32
"""K: candidates kept per position. A tree of 512 nodes seldom asks for more at one position."""


class DFlashDrafter:
    """A DFlash checkpoint bound to its target, whose embedding and head it uses."""

    def __init__(
        self,
        target: Target,
        stack: DecoderStack,
        fuse: Linear,
        fuse_norm: Tensor,
        *,
        block_size: int,
        mask_token_id: int,
        taps: tuple[int, ...],
    ) -> None:
        self.depth = block_size - 1
        self.taps = taps
        self._target = target
        self._num_ids = target.ids.vocab_size
        self._stack = stack
        self._fuse = fuse
        self._fuse_norm = fuse_norm
        self._mask_token_id = mask_token_id
        config = stack.config
        self._cache = KVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, target.dtype, target.device
        )
        self.caches: tuple[KVCache, ...] = (self._cache,)
        self._slots: dict[int, Slot] = {}
        self._pending = PendingTaps(fuse.in_features, target.dtype, target.device)

    @classmethod
    def load(cls, path: Path, target: Target) -> "DFlashDrafter":
        """Load a checkpoint directory for a target.

        Raises:
            ModelError: a key or tensor is missing, unknown, or does not fit the target.
        """
        config = read_config(path)
        options = block_options(path, config, target)
        try:
            tensors = load_file(path / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"drafter {path}: model.safetensors cannot be read: {error}") from None
        return cls.of_tensors(config, tensors, target, **options, name=str(path))

    @classmethod
    def of_tensors(
        cls,
        config: Any,  # noqa: ANN401 - a transformers config
        tensors: dict[str, Tensor],
        target: Target,
        *,
        block_size: int,
        mask_token_id: int,
        taps: tuple[int, ...],
        name: str = "drafter",
    ) -> "DFlashDrafter":
        """Build from tensors under their checkpoint names (cast to the target's dtype)."""
        stack_config = StackConfig.of(config)
        require_tensors(name, tensors, stack_config, target, len(taps))
        dtype, device = target.dtype, target.device
        tensors = {key: value.to(device, dtype) for key, value in tensors.items()}
        layers = [
            Layer.of(layer_tensors(tensors, f"layers.{number}."), stack_config)
            for number in range(stack_config.num_layers)
        ]
        rotary = Rotary(config, dtype, device)
        return cls(
            target,
            DecoderStack(stack_config, layers, tensors["norm.weight"], rotary),
            Linear(tensors["fc.weight"]),
            tensors["hidden_norm.weight"],
            block_size=block_size,
            mask_token_id=mask_token_id,
            taps=taps,
        )

    @property
    def shape(self) -> ModelShape:
        """What a draft pass costs."""
        return self._stack.config.shape(self._target.head.out_features, self._target.dtype)

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
        num_tokens += self._pending.num_tokens(key) + self.depth + 1
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = self._cache.open(num_tokens)
        else:
            self._cache.reserve(slot, num_tokens)

    def share(self, source_key: int, key: int, num_tokens: int) -> None:
        """Copy the first context tokens of one row to another, newly reserved."""
        self.catch_up([source_key])
        self._cache.share(self._slots[source_key], self._slots[key], num_tokens)

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Put the taps of new context tokens by until `catch_up`, where there is room for them."""
        for key, count in zip(keys, counts, strict=True):
            self.reserve(key, count)
        fits = [self._pending.has_room(*pair) for pair in zip(keys, counts, strict=True)]
        if all(fits):
            self._pending.put(keys, counts, features_SF)
            return
        parts = list(zip(keys, counts, features_SF.split(list(counts)), fits, strict=True))
        self.catch_up([key for key, _, _, fit in parts if not fit])
        for key, count, features, _ in parts:
            if self._pending.has_room(key, count):
                self._pending.put([key], [count], features)
            else:
                self._project([key], [count], features)

    def narrow(self, num_ids: int) -> None:
        """Score only the token ids below this from now on."""
        self._num_ids = num_ids

    def num_pending(self, key: int) -> int:
        """Context tokens of a row that `catch_up` has yet to project."""
        return self._pending.num_tokens(key)

    def catch_up(self, keys: Sequence[int]) -> None:
        """Project what was put by for some rows, all of it at once."""
        keys = [key for key in keys if self._pending.num_tokens(key)]
        if keys:
            self._project(keys, *self._pending.take(keys))

    def _project(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Fill every layer's keys and values of the next context tokens of some rows."""
        slots = [self._slots[key] for key in keys]
        starts = [slot.length for slot in slots]
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        )
        plan = StorePlan(self._cache, slots, counts)
        fused = self._stack.norm(self._fuse(features_SF), self._fuse_norm)
        at = to_device(positions, self._target.device)
        cos, sin = self._stack.rotary.at(at, int(positions.max()))
        for number, layer in enumerate(self._stack.layers):
            _, keys_values = self._stack.project(layer, fused, cos, sin)
            plan.store(number, keys_values)
        for slot, count in zip(slots, counts, strict=True):
            slot.length += count

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One pass over all rows' blocks, every row at its own context length and depth."""
        self.catch_up([row.key for row in rows])
        width = self.depth + 1
        order = pass_order([self._slots[row.key] for row in rows], [False] * len(rows))
        slots = [self._slots[rows[place].key] for place in order]
        for place, slot in zip(order, slots, strict=True):
            assert slot.length == len(rows[place].token_ids) - 1, "the drafter lags its row"
        visible = np.ones((width, width), np.bool_)
        plan = AttentionPlan(
            self._cache,
            [PassRow(slot, width, visible) for slot in slots],
            self._stack.config.num_q_heads,
        )
        blocks = np.full((len(rows), width), self._mask_token_id)
        blocks[:, 0] = [rows[place].token_ids[-1] for place in order]
        positions = np.array([slot.length for slot in slots])[:, None] + np.arange(width)
        device = self._target.device
        hidden = F.embedding(to_device(blocks.ravel(), device), self._target.embedding)
        at = to_device(positions.ravel(), device)
        out = self._stack.forward(hidden, at, int(positions.max()), plan).hidden_SE
        return self._best(out, np.array([rows[place].depth for place in order]), order)

    def forget(self, key: int) -> None:
        """Close the row's slot."""
        self._pending.drop(key)
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._cache.close(slot)

    def _best(self, hidden_SE: Tensor, depths_R: NDArray[np.intp], order: list[int]) -> Marginals:
        """The K best tokens of the wanted masked slots, back in the caller's order of rows.

        Only those go through the head, which is most of a draft pass.
        """
        wanted_RD = np.arange(self.depth) < depths_R[:, None]
        slots_RD = np.arange(len(hidden_SE)).reshape(len(order), -1)[:, 1:]
        hidden = hidden_SE[to_device(slots_RD[wanted_RD], hidden_SE.device)]
        best = best_tokens(
            self._target.first_logits(hidden, self._num_ids), NUM_RANKS, self._mask_token_id
        )
        log_probs_SK, token_ids_SK = (values.cpu().numpy() for values in best)
        shape = (*wanted_RD.shape, log_probs_SK.shape[1])
        log_probs_RDK = np.full(shape, -np.inf, log_probs_SK.dtype)
        token_ids_RDK = np.zeros(shape, token_ids_SK.dtype)
        log_probs_RDK[wanted_RD], token_ids_RDK[wanted_RD] = log_probs_SK, token_ids_SK
        back = np.argsort(order)
        return Marginals(log_probs_RDK[back], token_ids_RDK[back])
