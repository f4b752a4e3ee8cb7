"""The candidates of a step, best first: from marginals alone, or asked of the drafter.

Shape letters: R rows, D draft depth, K candidates of a slot, N parents.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.core.rounds import Ask, Children, Frontier, best_first_by_rounds
from bastion_batch.core.tree import Candidates, best_first
from bastion_batch.engine.drafters import ConditionalScores
from bastion_batch.engine.limits import Allowed


class Ranking(NamedTuple):
    """What ranks candidates: how probably each is accepted, by what was learnt."""

    acceptance: AcceptanceModel
    groups_R: NDArray[np.integer]
    """Each row's sampling group."""


class Search(NamedTuple):
    """How many candidates are looked for."""

    in_all: int | None
    """At most; None with `per_row`, for all of every row's."""
    per_row: int | None
    num_ranks: int | None
    """Only the best so many after every parent; None for all."""

    def among(
        self, allowed: Allowed, max_depths: NDArray[np.integer], ranking: Ranking | None
    ) -> Candidates:
        """Candidates that score the same after all parents.

        Args:
            allowed: what may become nodes.
            max_depths: the deepest node allowed in each row.
            ranking: None ranks by the drafter's own probabilities.
        """
        log_probs_RDK = allowed.marginals.log_probs_RDK[:, :, : self.num_ranks]
        scores = None
        if ranking is not None:
            scores = ranking.acceptance.log_scores(log_probs_RDK, ranking.groups_R)
        return best_first(
            log_probs_RDK,
            max_depths,
            self.in_all,
            allowed.leaves_RDK[:, :, : self.num_ranks],
            scores=scores,
            max_per_row=self.per_row,
        )

    def asking(
        self,
        scores: ConditionalScores,
        allowed: Allowed,
        max_depths: NDArray[np.integer],
        ranking: Ranking | None,
    ) -> Candidates:
        """Candidates of the last draft that score differently after different parents.

        Args:
            scores: the drafter's own.
            allowed: what may become nodes, every candidate in its own place.
            max_depths: the deepest node allowed in each row.
            ranking: None ranks by the drafter's own probabilities.
        """
        return best_first_by_rounds(
            _ask_of(scores, allowed.marginals.log_probs_RDK, ranking),
            max_depths,
            self.in_all,
            allowed.leaves_RDK,
            max_per_row=self.per_row,
            max_children=self.num_ranks,
        )


def _ask_of(
    scores: ConditionalScores, possible_RDK: NDArray[np.floating], ranking: Ranking | None
) -> Ask:
    def ask(frontier: Frontier) -> Children:
        rows_N, depth = frontier.rows_N, frontier.depth
        is_possible_NK = possible_RDK[rows_N, depth - 1] > -np.inf
        log_probs_NK = np.where(is_possible_NK, scores.log_probs_after(frontier), -np.inf)
        if ranking is None:
            return Children(log_probs_NK, log_probs_NK)
        groups_N = ranking.groups_R[rows_N]
        log_scores_NK = ranking.acceptance.log_scores_after(
            log_probs_NK, groups_N, depth, frontier.on_path_N
        )
        return Children(log_probs_NK, log_scores_NK)

    return ask
