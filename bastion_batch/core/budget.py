"""The budget rule: how many nodes of the whole batch are worth verifying in this step.

`G(N) = R + sum of the N largest scores`; the controller takes the N that maximises
`G(N) / (T_draft + T_aux + T_verify(N))`, scanning every N because a measured latency is a staircase
and the first decrease need not be the last. How deep rows are drafted follows from what was worth
verifying.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Budget(NamedTuple):
    """What a step is worth."""

    num_nodes: int
    expected_tokens: float
    """Over all rows, bonus tokens included."""
    tokens_per_second: float
    """Predicted, of the step."""


def best_budget(
    log_scores_N: NDArray[np.floating], num_rows: int, step_seconds_N: NDArray[np.floating]
) -> Budget:
    """The number of nodes with the most predicted tokens per second.

    Args:
        log_scores_N: path log-probabilities of the candidates, decreasing.
        num_rows: live rows, each of which commits at least its bonus token.
        step_seconds_N: predicted seconds of the whole step with 0, 1, ..., len(log_scores_N) nodes.
    """
    gains = num_rows + np.concatenate([[0.0], np.cumsum(np.exp(log_scores_N))])
    rates = gains / step_seconds_N
    num_nodes = int(np.argmax(rates))
    return Budget(num_nodes, float(gains[num_nodes]), float(rates[num_nodes]))


class DraftDepths:
    """How deep each row is drafted: as deep as its trees go, and a little deeper.

    Scoring a position is most of what drafting a row costs, and in a large batch few rows have
    nodes beyond their first positions. A row's depth follows its trees: down slowly, up at once.
    A tree that could have gone deeper does so a step later. A new row begins where rows of a batch
    of this size usually are.

    Args:
        max_depth: D; where the first rows of a batch size begin.
    """

    MARGIN = 2
    """Positions scored beyond the deepest node."""
    MAX_FALL = 2
    """Positions fewer from one step to the next."""
    RATE = 0.1
    """Of the running mean of what rows of a batch size want."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._depths: dict[int, int] = {}
        self._usual: dict[int, float] = {}

    def of(self, keys: Sequence[int]) -> list[int]:
        """Depths for the coming step; other rows are forgotten."""
        usual = self._usual.get(len(keys).bit_length(), self._max_depth)
        first = min(math.ceil(usual), self._max_depth)
        self._depths = {key: self._depths.get(key, first) for key in keys}
        return list(self._depths.values())

    def observe(self, keys: Sequence[int], tree_depths: Sequence[int]) -> None:
        """Take note of how deep the trees of some rows went."""
        wanted = [min(depth + self.MARGIN, self._max_depth) for depth in tree_depths]
        for key, depth in zip(keys, wanted, strict=True):
            self._depths[key] = max(depth, self._depths[key] - self.MAX_FALL)
        size, mean = len(keys).bit_length(), sum(wanted) / len(wanted)
        usual = self._usual.setdefault(size, mean)
        self._usual[size] += self.RATE * (mean - usual)
