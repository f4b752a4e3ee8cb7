"""Policies for a replay: what each step verifies, given the marginals and what steps cost.

They are the engine's own stopping rules (`ar`, `dflash`, `ddtree`, `bastion`) with a measured curve
in place of its latency model.

Shape letters: R live rows, D depth, K ranks, N nodes.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.acceptance import AcceptanceModel, Outcomes
from bastion_batch.core.budget import BatchGates, best_budget
from bastion_batch.core.tree import (
    DraftTree,
    PathScores,
    best_first,
    plant,
    take_first,
    take_per_row,
)

MAX_NODES_PER_ROW = 128
MAX_NODES = 512


class StepCurve(NamedTuple):
    """Measured seconds of steps of one batch size."""

    num_nodes_N: NDArray[np.float64]
    """Drafted nodes over all rows, increasing."""
    drafted_seconds_N: NDArray[np.float64]
    """Of whole steps that draft and verify so many nodes."""
    plain_seconds: float
    """Of a whole step of plain decoding."""

    def seconds(self, num_nodes: NDArray[np.integer]) -> NDArray[np.float64]:
        """Of drafted steps: interpolated, and on from the nearest two points outside them."""
        nodes, taken = self.num_nodes_N, self.drafted_seconds_N
        inside = np.interp(num_nodes, nodes, taken)
        if len(nodes) < 2:
            return inside
        slopes = np.maximum(np.diff(taken) / np.diff(nodes), 0.0)
        below = np.minimum(num_nodes - nodes[0], 0) * slopes[0]
        above = np.maximum(num_nodes - nodes[-1], 0) * slopes[-1]
        return np.maximum(inside + below + above, self.plain_seconds)


class Position(NamedTuple):
    """What a policy may know before a step of all live rows."""

    log_probs_RDK: NDArray[np.float32]
    max_depths_R: NDArray[np.intp]
    leaves_RDK: NDArray[np.bool_]
    """Tokens after which nothing can follow."""


class Policy(Protocol):
    """Decides what each step verifies."""

    def trees(self, at: Position) -> list[DraftTree] | None:
        """One tree per row, or None to decode plainly without drafting."""
        ...

    def learn(self, outcomes: Outcomes) -> None:
        """Take in which nodes were accepted, of those whose parent was."""
        ...


class Fixed:
    """As many nodes in every row, the drafter's own best first: `ddtree`; or only the top-1 chain.

    Args:
        nodes_per_row: 0 decodes plainly; None is the whole chain of most probable tokens.
    """

    def __init__(self, nodes_per_row: int | None) -> None:
        self._nodes_per_row = nodes_per_row

    def trees(self, at: Position) -> list[DraftTree] | None:
        """The same number of nodes in every row, as far as there are candidates."""
        if self._nodes_per_row == 0:
            return None
        is_chain = self._nodes_per_row is None
        num_rows, depth, num_ranks = at.log_probs_RDK.shape
        ranks = 1 if is_chain else num_ranks
        limit = depth if self._nodes_per_row is None else self._nodes_per_row
        candidates = best_first(
            at.log_probs_RDK[:, :, :ranks],
            at.max_depths_R,
            None,
            at.leaves_RDK[:, :, :ranks],
            max_per_row=limit,
        )
        return plant(candidates, take_per_row(candidates, limit), num_rows)

    def learn(self, outcomes: Outcomes) -> None:
        """Nothing changes it."""


class Adaptive:
    """The budget with the most expected tokens per second under a cost curve: `bastion`.

    Args:
        curve: what steps cost.
        group: the sampling group of the rows.
        acceptance: scores the candidates and goes on learning; None trusts the drafter's q.
    """

    def __init__(
        self, curve: StepCurve, group: int = 0, acceptance: AcceptanceModel | None = None
    ) -> None:
        self._curve = curve
        self._group = group
        self._acceptance = acceptance
        self._gates = BatchGates()

    def trees(self, at: Position) -> list[DraftTree] | None:
        """The best of the batch, or None while drafting does not pay."""
        num_rows = len(at.log_probs_RDK)
        if not self._gates.wants_draft(num_rows):
            return None
        candidates = best_first(
            at.log_probs_RDK,
            at.max_depths_R,
            min(MAX_NODES, num_rows * MAX_NODES_PER_ROW),
            at.leaves_RDK,
            scores=self._scores(at.log_probs_RDK),
        )
        seconds_N = self._curve.seconds(np.arange(len(candidates) + 1))
        budget = best_budget(candidates.log_scores_N, num_rows, seconds_N)
        plain_rate = num_rows / self._curve.plain_seconds
        self._gates.observe(num_rows, budget.tokens_per_second, plain_rate)
        return plant(candidates, take_first(candidates, budget.num_nodes), num_rows)

    def learn(self, outcomes: Outcomes) -> None:
        """Let the acceptance model see them."""
        if self._acceptance is not None and outcomes.num_outcomes:
            self._acceptance.observe(outcomes)

    def _scores(self, log_probs_RDK: NDArray[np.float32]) -> PathScores | None:
        if self._acceptance is None:
            return None
        groups = np.full(len(log_probs_RDK), self._group)
        return self._acceptance.log_scores(log_probs_RDK, groups)
