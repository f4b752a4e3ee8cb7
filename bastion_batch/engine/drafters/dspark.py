"""DSpark (arXiv 2607.05147): DFlash with a Markov head, and mostly its own embedding and head.

A confidence head, where a checkpoint has one, is checked and loaded with it but plays no part. It
estimates how probably the best candidate of a slot is accepted, which `core.acceptance` learns from
what this target accepts, at every depth and temperature, for all candidates and not only the best.

Shape letters: R rows, S scored slots, P parents, K candidates, E hidden size, N rank.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.rounds import Frontier
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.dflash import Drafted
from bastion_batch.engine.drafters.markov import MarkovBias
from bastion_batch.engine.drafters.transitions import TransitionDrafter, slots_of
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device, to_host


class DSparkDrafter(TransitionDrafter):
    """A DSpark checkpoint with a Markov head, bound to its target; see `DFlashDrafter`."""

    def __init__(
        self, description: DrafterDescription, tensors: Mapping[str, Tensor], target: Target
    ) -> None:
        super().__init__(description, tensors, target)
        assert description.markov is not None, "without the head it is a DFlash drafter"
        self._markov = MarkovBias(description.markov, tensors)

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One pass over all rows' blocks."""
        if self._markov.kind != "rnn":
            return super().draft(rows)
        has_step_before = self.description.first_prediction_slot == 1
        drafted = self.drafted(rows, with_anchors=has_step_before)
        self._transitions = RecurrentScores(self._markov, drafted, rows)
        return self.marginals(drafted)

    def transitions(self, drafted: Drafted, parents_SP: Tensor) -> Tensor:
        """By the Markov head, normalised over the vocabulary."""
        outputs = self._markov.outputs(drafted.hidden_SE, parents_SP)
        return self._markov.log_probs(outputs, drafted.best)


class RecurrentScores:
    """Scores that depend on the whole path before: worked out in rounds, as a tree asks.

    A parent's state is that of the round that found it, so a round keeps no more than the next one
    needs.

    Args:
        markov: the recurrent head.
        drafted: the candidates; with anchors where their slots, which then predict nothing, move
            the state first.
        rows: that were drafted, in the caller's order.
    """

    def __init__(self, markov: MarkovBias, drafted: Drafted, rows: Sequence[DraftRow]) -> None:
        self._markov = markov
        self._drafted = drafted
        self._slots_RD = slots_of(drafted)
        self._device = drafted.hidden_SE.device
        self._roots_R = np.array([row.token_ids[-1] for row in rows], np.int64)
        self._states_NN = markov.initial_states(len(rows))
        if drafted.anchors_RE is not None:
            back = to_device(np.argsort(drafted.order), self._device)
            roots = to_device(self._roots_R, self._device)
            anchors_RE = drafted.anchors_RE[back]
            self._states_NN = markov.step(self._states_NN, anchors_RE, roots).states_NN

    def after(self, frontier: Frontier) -> NDArray[np.floating]:
        """One step of the recurrence for all parents, and one copy to the host."""
        rows_N, depth = frontier.rows_N, frontier.depth
        best, hidden_SE = self._drafted.best, self._drafted.hidden_SE
        slots_N = to_device(self._slots_RD[rows_N, depth - 1], self._device)
        if depth == 1:
            parents_N = to_device(self._roots_R[rows_N], self._device)
            before_N = to_device(rows_N.astype(np.int64), self._device)
        else:
            of_parents_N = to_device(self._slots_RD[rows_N, depth - 2], self._device)
            columns_N = to_device(frontier.columns_N.astype(np.int64), self._device)
            parents_N = best.target_ids_SK[of_parents_N, columns_N]
            before_N = to_device(frontier.askers_N.astype(np.int64), self._device)
        step = self._markov.step(self._states_NN[before_N], hidden_SE[slots_N], parents_N)
        self._states_NN = step.states_NN
        of_slots = type(best)(*(part[slots_N] for part in best))
        log_probs_N1K = self._markov.log_probs(step.output_NN[:, None], of_slots)
        return to_host(log_probs_N1K[:, 0])[0]
