"""Scores of drafted candidates given the token before them, as a head of the drafter gives them.

Where they depend on that token alone, there are K candidates before K candidates at every slot: all
of it is worked out together with the draft and comes to the host in the same copy, and the rounds
of a tree are answered from there. With a head of rank r that is K * K * r multiplications at a slot,
and K * r * r + E * r more where the token before opens a gate; the head over the vocabulary does
E times its ids, mostly a hundred to ten thousand times as much.

Shape letters: R rows, D depth, S scored slots, P parents, K candidates, E hidden size, N parents of
a frontier.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.rounds import Frontier
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.dflash import DFlashDrafter, Drafted
from bastion_batch.engine.transfer import to_device, to_host


class Transitions(Protocol):
    """The scores of one draft."""

    def after(self, frontier: Frontier) -> NDArray[np.floating]:
        """Log-probabilities of the candidates after the frontier's parents, `[N, K]`."""
        ...


class TransitionTable(NamedTuple):
    """Scores that depend on the token before and no other."""

    log_probs_SPK: NDArray[np.floating]
    """Parents are the candidates of the slot before; before the first slot there is one root."""
    slots_RD: NDArray[np.intp]
    """See `slots_of`."""

    def after(self, frontier: Frontier) -> NDArray[np.floating]:
        """Look the frontier's parents up."""
        slots_N = self.slots_RD[frontier.rows_N, frontier.depth - 1]
        return self.log_probs_SPK[slots_N, frontier.columns_N]


def slots_of(drafted: Drafted) -> NDArray[np.intp]:
    """Which scored slot belongs to each row, in the caller's order, and depth; -1 to none."""
    slots_RD = np.full(drafted.wanted_RD.shape, -1)
    slots_RD[drafted.wanted_RD] = np.arange(drafted.wanted_RD.sum())
    return slots_RD[np.argsort(drafted.order)]


def parents_of(rows: Sequence[DraftRow], drafted: Drafted) -> Tensor:
    """The tokens that may come before each scored slot, `[S, K]`.

    They are the candidates of the slot before; before a first slot, K times the root.
    """
    roots_R = np.array([rows[place].token_ids[-1] for place in drafted.order], np.int64)
    at_row_S, depth_S = np.nonzero(drafted.wanted_RD)
    roots_S = to_device(np.where(depth_S == 0, roots_R[at_row_S], -1), drafted.hidden_SE.device)
    candidates_SK = drafted.best.target_ids_SK
    return torch.where(roots_S[:, None] >= 0, roots_S[:, None], candidates_SK.roll(1, 0))


class TransitionDrafter(DFlashDrafter, ABC):
    """A drafter with a head that scores candidates given the token before them."""

    _transitions: Transitions

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One pass over all rows' blocks; the candidates' transitions are kept until the next."""
        drafted = self.drafted(rows)
        best = drafted.best
        log_probs_SK, ids_SK, table_SPK = to_host(
            best.log_probs_SK,
            best.target_ids_SK,
            self.transitions(drafted, parents_of(rows, drafted)),
        )
        self._transitions = TransitionTable(table_SPK, slots_of(drafted))
        return self.arranged(drafted, log_probs_SK, ids_SK)

    def log_probs_after(self, frontier: Frontier) -> NDArray[np.floating]:
        """Log-probabilities `[N, K]` of the last draft's candidates after some parents."""
        return self._transitions.after(frontier)

    @abstractmethod
    def transitions(self, drafted: Drafted, parents_SP: Tensor) -> Tensor:
        """Log-probabilities of all candidates after each of the given parents, `[S, P, K]`."""
