"""DFlash 2's candidate selector: scores of a slot's candidates given the token before the slot.

score(c | t) = unary(c) + < P[t] * W y, S[c] >, with the slot's logits as unary scores, y its output
after the final norm, and two codebooks P and S. The drafter was trained to choose among the best
candidates of the slot by the softmax of these scores, and that is its q: normalised over the K
candidates of the slot, which have all the probability between them.

Shape letters: S slots, P parents, K candidates, E hidden size, N rank.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bastion_batch.engine.drafters.head import BestIds
from bastion_batch.engine.linear import Linear

PREFIX = "candidate_selector."


class CandidateSelector:
    """The selector's weights.

    Args:
        tensors: of the checkpoint, under their normalised names.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._project = Linear(tensors[f"{PREFIX}hidden_projection.weight"])
        self._predecessors_VN = tensors[f"{PREFIX}predecessor_codebook"]
        self._successors_VN = tensors[f"{PREFIX}successor_codebook"]

    def transitions(self, hidden_SE: Tensor, ids_SK: Tensor, parents_SP: Tensor) -> Tensor:
        """What the token before a slot adds to the scores of its candidates, `[S, P, K]`.

        Args:
            hidden_SE: the slots after the final norm.
            ids_SK: their candidates.
            parents_SP: tokens that may come before.
        """
        wide = torch.promote_types(hidden_SE.dtype, torch.float32)
        projected_SN = self._project(hidden_SE)
        left_SPN = self._predecessors_VN[parents_SP] * projected_SN[:, None]
        right_SKN = self._successors_VN[ids_SK]
        return left_SPN.to(wide) @ right_SKN.to(wide).mT

    def log_probs(self, hidden_SE: Tensor, best: BestIds, parents_SP: Tensor) -> Tensor:
        """Log-probabilities of the slots' candidates after each parent, `[S, P, K]`."""
        added = self.transitions(hidden_SE, best.target_ids_SK, parents_SP)
        return (best.log_probs_SK[:, None] + added).log_softmax(-1)
