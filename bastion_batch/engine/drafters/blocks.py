"""How the slots of drafted blocks attend, layer by layer.

Shape letters: W block width, L layers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.engine.attention import Attends, AttentionPlan, PassRow
from bastion_batch.engine.cache import KVCache, Slot
from bastion_batch.engine.drafters.description import DrafterDescription, LayerAttention


class LayeredPlan:
    """One plan of attention for every layer; layers that attend alike share theirs."""

    def __init__(self, plans_L: Sequence[AttentionPlan]) -> None:
        self._plans_L = plans_L

    def attend(self, layer: int, heads_SHD: Tensor) -> Tensor:
        """As `AttentionPlan.attend`, by the layer's own plan."""
        return self._plans_L[layer].attend(layer, heads_SHD)


class BlockAttention:
    """Makes the plans of passes over whole blocks.

    Args:
        description: says what each layer sees.
        cache: of the drafter.
    """

    def __init__(self, description: DrafterDescription, cache: KVCache) -> None:
        self._cache = cache
        self._num_q_heads = description.num_q_heads
        self._layers = description.layers
        self._visible = {
            kind: _visible(kind, description.block_width) for kind in set(description.layers)
        }

    def plan(self, slots: Sequence[Slot]) -> Attends:
        """How a pass attends whose blocks follow the contexts of these slots, in `pass_order`."""
        longest = max(slot.length for slot in slots)
        plans: dict[LayerAttention, AttentionPlan] = {}
        for kind in self._visible:
            rows = [PassRow(slot, *self._sees(kind, slot, longest)) for slot in slots]
            plans[kind] = AttentionPlan(self._cache, rows, self._num_q_heads)
        if len(plans) == 1:
            return next(iter(plans.values()))
        return LayeredPlan([plans[kind] for kind in self._layers])

    def _sees(
        self, kind: LayerAttention, slot: Slot, longest: int
    ) -> tuple[int, NDArray[np.bool_], NDArray[np.intp] | None]:
        """Width, what is seen of the block, and of the context where not all of it is."""
        visible_WW = self._visible[kind]
        width = len(visible_WW)
        if kind.window is None or longest <= kind.window - width:
            return width, visible_WW, None
        oldest = slot.length - kind.window
        if kind.window_origin == "anchor":
            return width, visible_WW, np.full(width, oldest)
        return width, visible_WW, oldest + 1 + np.arange(width)


def _visible(kind: LayerAttention, width: int) -> NDArray[np.bool_]:
    """What each slot sees of its own block, `[W, W]`."""
    ahead_WW = np.arange(width) - np.arange(width)[:, None]
    visible = ahead_WW <= 0 if kind.causal else np.ones((width, width), np.bool_)
    if kind.window is not None and kind.window_origin == "query":
        visible = visible & (np.abs(ahead_WW) < kind.window)
    return visible
