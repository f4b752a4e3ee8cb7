"""DSpark's Markov head: a low-rank bias on a slot's logits from the token before the slot.

vanilla: bias = w2 w1[t]. gated: w2 (sigmoid(gate [y; w1[t]]) * w1[t]). rnn: a state runs along the
block; of joint [state; w1[t]; y] = (g, c, o) the bias is w2 tanh(o), and the next slot's state is
sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c): it depends on the whole path.

The bias is worked out for the K best tokens of a slot only. Its q is normalised over the whole
vocabulary, in which every other token keeps the logit that it has without the bias: the bias of all
tokens after all parents would cost more than the head itself.

Shape letters: S slots, P parents, K candidates, E hidden size, N rank, U draft and V target
vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bastion_batch.engine.drafters.description import MarkovHead
from bastion_batch.engine.drafters.head import BestIds
from bastion_batch.engine.linear import Linear

PREFIX = "markov_head."


class Recurrence(NamedTuple):
    """One slot's step of the recurrent head, for N parents."""

    output_NN: Tensor
    """What w2 turns into the bias."""
    states_NN: Tensor
    """For the slot after it."""


class _Gate:
    """The gate's product, of which the hidden state's part is the same after all parents."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        rank = weight.shape[0]
        self._of_hidden = Linear(weight[:, :-rank].contiguous(), bias)
        self._of_embedded = Linear(weight[:, -rank:].contiguous())

    def __call__(self, hidden_SE: Tensor, embedded_SPN: Tensor) -> Tensor:
        """Before the sigmoid, `[S, P, N]`."""
        of_embedded = self._of_embedded(embedded_SPN.flatten(0, 1)).view_as(embedded_SPN)
        return self._of_hidden(hidden_SE)[:, None] + of_embedded


class MarkovBias:
    """The head's weights.

    Args:
        head: which of its kinds it is.
        tensors: of the checkpoint, under their normalised names.
    """

    def __init__(self, head: MarkovHead, tensors: Mapping[str, Tensor]) -> None:
        self.kind = head.kind
        self.rank = head.rank
        self._w1_VN = tensors[f"{PREFIX}markov_w1.weight"]
        self._w2_UN = tensors[f"{PREFIX}markov_w2.weight"]
        self._joint = self._gate = None
        if head.kind == "rnn":
            self._joint = Linear(*(tensors[f"{PREFIX}joint_proj.{p}"] for p in ("weight", "bias")))
        if head.kind == "gated":
            weight, bias = (tensors[f"{PREFIX}gate_proj.{part}"] for part in ("weight", "bias"))
            self._gate = _Gate(weight, bias)

    def outputs(self, hidden_SE: Tensor, parents_SP: Tensor) -> Tensor:
        """What w2 turns into the bias after each parent, `[S, P, N]`; not of the recurrent head."""
        embedded_SPN = self._w1_VN[parents_SP]
        if self._gate is None:
            return embedded_SPN
        return self._gate(hidden_SE, embedded_SPN).sigmoid() * embedded_SPN

    def step(self, states_NN: Tensor, hidden_NE: Tensor, parents_N: Tensor) -> Recurrence:
        """One slot further, for N slots after one parent each; of the recurrent head."""
        assert self._joint is not None, "only the recurrent head has states"
        embedded = self._w1_VN[parents_N]
        joint = self._joint(torch.cat([states_NN, embedded, hidden_NE], -1))
        gate, candidate, output = joint.chunk(3, -1)
        states = torch.lerp(candidate.tanh(), states_NN, gate.sigmoid())
        return Recurrence(output.tanh(), states)

    def initial_states(self, num_rows: int) -> Tensor:
        """Before the first slot, `[num_rows, N]`."""
        return self._w1_VN.new_zeros(num_rows, self.rank)

    def log_probs(self, outputs_SPN: Tensor, best: BestIds) -> Tensor:
        """Log-probabilities of the slots' candidates after each parent, `[S, P, K]`.

        Args:
            outputs_SPN: from `outputs` or `step`.
            best: the candidates, and how probable they are without the bias.
        """
        unary_SK = best.log_probs_SK
        right_SKN = self._w2_UN[best.draft_ids_SK].to(unary_SK.dtype)
        biased = unary_SK[:, None] + outputs_SPN.to(unary_SK.dtype) @ right_SKN.mT
        others_S1 = (1 - unary_SK.exp().sum(-1, keepdim=True)).clamp_(min=0).log_()
        mass = torch.logaddexp(biased.logsumexp(-1), others_S1.expand(-1, biased.shape[1]))
        return (biased - mass[..., None]).clamp_(max=0)
