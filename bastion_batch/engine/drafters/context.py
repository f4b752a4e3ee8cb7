"""Keys and values of context tokens for every layer of a drafter, in one product.

All layers project the same fused features, and of context tokens nobody asks for queries.

Shape letters: S tokens, E hidden size, L layers, G key-value heads, D head size.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bastion_batch.engine.kernels import rotate_heads
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.transformer import StackConfig, layer_tensors


class ContextHeads:
    """The key and value projections of all layers.

    Args:
        tensors: the drafter's, under their normalised names.
        config: of its layers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: StackConfig) -> None:
        layers = [
            layer_tensors(tensors, f"layers.{n}.self_attn.") for n in range(config.num_layers)
        ]
        names = ("k_proj", "v_proj")
        weights = [layer[f"{name}.weight"] for name in names for layer in layers]
        biases = [layer.get(f"{name}.bias") for name in names for layer in layers]
        known = [bias for bias in biases if bias is not None]
        assert len(known) in (0, len(biases)), "some projections have a bias and some have none"
        self._linear = Linear(torch.cat(weights), torch.cat(known) if known else None)
        self._norm = None
        if "k_norm.weight" in layers[0]:
            norms = [layer["k_norm.weight"].expand(config.num_kv_heads, -1) for layer in layers]
            self._norm = torch.cat(norms)
        self._config = config

    def __call__(self, fused_SE: Tensor, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
        """Rotated keys, and values, `[S, 2, G, D]` of each layer."""
        config = self._config
        num_keys = config.num_layers * config.num_kv_heads
        heads = self._linear(fused_SE).unflatten(-1, (-1, config.head_dim))
        rotate_heads(heads, num_keys, self._norm, config.norm_eps, cos, sin)
        heads_S2LGD = heads.unflatten(1, (2, config.num_layers, config.num_kv_heads))
        return iter(heads_S2LGD.unbind(2))
