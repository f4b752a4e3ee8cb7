"""Stairs: matrix products are computed in tiles of tokens, so a pass pays for a tile on entering it."""

from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.roofline import PassLoad


class Stairs(NamedTuple):
    """How a pass of some tokens counts."""

    tile: int = 1
    share: float = 0.0
    """Of a tile's cost, how much comes with its first token."""

    @overload
    def counted(self, num_tokens: float) -> float: ...
    @overload
    def counted(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def counted(self, num_tokens: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """For how many tokens a pass is to be priced."""
        whole = np.ceil(np.asarray(num_tokens) / self.tile) * self.tile
        return num_tokens + self.share * (whole - num_tokens)

    def of(self, load: PassLoad) -> PassLoad:
        """A pass as it is to be priced; what attention does is as it was."""
        return load._replace(
            num_tokens=self.counted(load.num_tokens), num_logits=self.counted(load.num_logits)
        )
