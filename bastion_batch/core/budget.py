"""The budget rule: how many nodes of the whole batch are worth verifying in this step.

`G(N) = R + sum of the N largest scores`; the controller takes the N that maximises
`G(N) / (T_draft + T_aux + T_verify(N))`, scanning every N because a measured latency is a staircase
and the first decrease need not be the last. Plain decoding needs no drafter pass: when it is
predicted to be faster the drafter is left out, and tried again after an exponential back-off.
"""

import math
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


class DraftGate:
    """Decides step by step whether the drafter is run at all.

    While drafting pays, it always runs. When a drafted step was predicted to be slower than plain
    decoding of the same rows, the next `wait` steps are plain, and the wait doubles up to
    `MAX_WAIT`, so that probing a useless drafter costs a vanishing share of the time.
    """

    MAX_WAIT = 256
    SMOOTHING = 0.2

    def __init__(self) -> None:
        self._advantage = 0.0
        self._wait = 1
        self._waited = 0
        self._plain_left = 0

    def wants_draft(self) -> bool:
        """Whether to run the drafter in the coming step."""
        if self._plain_left:
            self._plain_left -= 1
            self._waited += 1
            return False
        return True

    def observe(self, drafted_rate: float, plain_rate: float) -> None:
        """Take note of a drafted step: predicted tokens per second with and without drafting.

        What was known counts for less the longer ago it was.
        """
        kept = (1 - self.SMOOTHING) ** (1 + self._waited)
        self._waited = 0
        self._advantage = kept * self._advantage + (1 - kept) * math.log(drafted_rate / plain_rate)
        if self._advantage >= 0:
            self._wait = 1
            return
        self._plain_left = self._wait
        self._wait = min(2 * self._wait, self.MAX_WAIT)
