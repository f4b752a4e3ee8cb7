"""What scores the ids a drafter can propose: the target's head or its own, whole or reduced.

A *draft id* is a row of the head. Where the drafter's vocabulary is reduced it is not the target's
id, and only the ids it has are ever proposed.

Shape letters: S slots, U draft ids, K ranks, E hidden size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_batch.engine.buckets import product_bucket_for
from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.drafters.ranking import best_tokens
from bastion_batch.engine.linear import Linear
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device


class BestIds(NamedTuple):
    """The K best of every slot, best first."""

    log_probs_SK: Tensor
    """In float32 or better, normalised over all ids that are allowed."""
    draft_ids_SK: Tensor
    """Rows of the head."""
    target_ids_SK: Tensor
    """The same ids as the target counts them."""


class _Scored(NamedTuple):
    """The part of an own head that is read."""

    linear: Linear
    draft_ids: Tensor | None
    """Of its rows; None where they count from 0."""
    mask_row: int
    """The row that stands for the mask token; one beyond them where none does."""


class DraftHead:
    """The head of a drafter, with its scale, cap and vocabulary.

    Args:
        description: of the drafter.
        target: whose head is used where the drafter has none.
        own: the drafter's own head `[U, E]`.
    """

    def __init__(self, description: DrafterDescription, target: Target, own: Tensor | None) -> None:
        self._target = target
        self._own = own
        self._multiplier = description.output_multiplier
        self._softcap = description.softcap
        self._mask_token_id = description.mask_token_id
        ids_U = description.target_ids_U
        self._target_ids_U = None if ids_U is None else to_device(ids_U, target.device)
        self._num_ids = target.ids.vocab_size
        self._bucket = product_bucket_for(target.device, target.dtype)
        self._scored = None if own is None else self._part(own)

    @property
    def num_rows(self) -> int:
        """Ids that are scored when the head is not narrowed."""
        return self._target.head.out_features if self._own is None else len(self._own)

    def narrow(self, num_ids: int) -> None:
        """Score only target ids below this from now on."""
        num_ids = min(num_ids, self._target.ids.vocab_size)
        if num_ids == self._num_ids:
            return
        self._num_ids = num_ids
        if self._own is not None:
            self._scored = self._part(self._own)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Logits of the ids that are scored, one row of the head each."""
        if self._scored is None:
            logits = self._target.first_logits(hidden_SE.to(self._target.dtype), self._num_ids)
        else:
            logits = self._scored.linear(hidden_SE)
        if self._multiplier != 1:
            logits = logits * self._multiplier
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def best(self, hidden_SE: Tensor, num_ranks: int) -> BestIds:
        """The best ids of every slot; never the mask token."""
        scored = self._scored
        mask_row = self._mask_token_id if scored is None else scored.mask_row
        num_slots = len(hidden_SE)
        padded_SE = F.pad(hidden_SE, (0, 0, 0, self._bucket(num_slots) - num_slots))
        logits_SU = self.logits(padded_SE)[:num_slots]
        log_probs, rows = best_tokens(logits_SU, num_ranks, mask_row)
        draft_ids = rows if scored is None or scored.draft_ids is None else scored.draft_ids[rows]
        ids_U = self._target_ids_U
        return BestIds(log_probs, draft_ids, draft_ids if ids_U is None else ids_U[draft_ids])

    def _part(self, own_UE: Tensor) -> _Scored:
        """What is left of an own head for the ids that are scored."""
        ids_U = self._target_ids_U
        if ids_U is None:
            return _Scored(Linear(own_UE[: self._num_ids]), None, self._mask_token_id)
        kept = (ids_U < self._num_ids).nonzero()[:, 0]
        mask_rows = (ids_U[kept] == self._mask_token_id).nonzero()
        mask_row = int(mask_rows[0, 0]) if len(mask_rows) else len(kept)
        if len(kept) == len(own_UE):
            return _Scored(Linear(own_UE), None, mask_row)
        return _Scored(Linear(own_UE[kept]), kept, mask_row)
