"""Cross-entropy through the target's frozen head, in pieces: no logits outlive their piece.

What a position should predict is the text's token, or the target's own distribution over its
likeliest tokens there, or a mixture: a distribution says more of a position than one draw does.

Over the whole vocabulary, or over a part of it: the commonest tokens, all tokens to be predicted,
and others drawn at random, whose logits are raised so that they stand for all that are left out.

Shape letters: N positions, K tokens that share a label, E hidden size, V vocabulary, U the part of
it that is scored.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_VALUES = 1 << 24
"""Logits held at once, unless told otherwise."""


class Labels(NamedTuple):
    """What some positions should predict."""

    ids_NK: Tensor
    """The first is the text's token; one may come twice."""
    shares_NK: Tensor
    """Of each in the label; together 1."""

    @classmethod
    def mixed(
        cls, token_ids_N: Tensor, next_ids_NK: Tensor, probabilities_NK: Tensor, share: float
    ) -> "Labels":
        """The text's tokens, and so large a share of the distributions, made to sum to 1.

        K may be 0 if the share is.
        """
        soft = share * probabilities_NK / probabilities_NK.sum(-1, keepdim=True)
        hard = torch.full_like(token_ids_N[:, None], 1 - share, dtype=torch.float32)
        ids = torch.cat([token_ids_N[:, None], next_ids_NK.to(token_ids_N.dtype)], -1)
        return cls(ids, torch.cat([hard, soft], -1))


class Scored(NamedTuple):
    """What a loss tells."""

    loss: Tensor
    """The weighted mean, differentiable."""
    is_right_N: Tensor
    """Whether the best scored token is the one to be predicted."""


class HeadLoss:
    """Scores outputs of the drafter with a target's head.

    Args:
        head_VE: the head's weight.
        common_ids: tokens that are always scored; None for the whole vocabulary.
        seed: of the tokens drawn at random.
        piece_values: logits held at once.
    """

    def __init__(
        self,
        head_VE: Tensor,
        common_ids: NDArray[np.int64] | None,
        seed: int,
        piece_values: int = PIECE_VALUES,
    ) -> None:
        self._head_VE = head_VE
        self._common_ids = common_ids
        self._seed = seed
        self._piece_values = piece_values

    def __call__(self, hidden_NE: Tensor, labels: Labels, weights_N: Tensor, step: int) -> Scored:
        """The loss of predicting these labels, each weighing so much."""
        head, offsets = self._head_VE, None
        if self._common_ids is not None:
            wanted = labels.ids_NK.cpu().numpy()
            ids, offsets = self._part(wanted, step)
            head = head[torch.from_numpy(ids).to(head.device)]
            offsets = torch.from_numpy(offsets).to(head.device)
            places = torch.from_numpy(np.searchsorted(ids, wanted)).to(head.device)
            labels = Labels(places, labels.shares_NK)
        weights = weights_N / weights_N.sum()
        piece_size = max(1, self._piece_values // len(head))
        loss, is_right = _FrozenHeadLoss.apply(
            hidden_NE, head, offsets, *labels, weights, piece_size
        )
        return Scored(loss, is_right)

    def _part(
        self, wanted: NDArray[np.int64], step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids to score, rising, and what is added to each one's logit."""
        assert self._common_ids is not None
        num_ids = len(self._head_VE)
        always = np.union1d(self._common_ids, wanted)
        others = np.setdiff1d(np.arange(num_ids), always)
        generator = np.random.default_rng((self._seed, step))
        drawn = generator.choice(others, min(len(others), len(self._common_ids)), replace=False)
        ids = np.concatenate([always, drawn])
        offsets = np.zeros(len(ids), np.float32)
        if len(drawn):
            offsets[len(always) :] = np.log(len(others) / len(drawn))
        order = np.argsort(ids)
        return ids[order], offsets[order]


class _FrozenHeadLoss(torch.autograd.Function):
    """The loss and, computed with it, its gradient by the outputs: logits are needed once."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        hidden_NE: Tensor,
        head_UE: Tensor,
        offsets_U: Tensor | None,
        labels_NK: Tensor,
        shares_NK: Tensor,
        weights_N: Tensor,
        piece_size: int,
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=hidden_NE.device)
        gradient = torch.empty_like(hidden_NE)
        is_right = torch.empty_like(labels_NK[:, 0], dtype=torch.bool)
        for start in range(0, len(hidden_NE), piece_size):
            piece = slice(start, start + piece_size)
            labels, shares, weights = labels_NK[piece], shares_NK[piece], weights_N[piece, None]
            logits = (hidden_NE[piece].to(head_UE.dtype) @ head_UE.T).float()
            is_right[piece] = logits.argmax(-1) == labels[:, 0]
            if offsets_U is not None:
                logits += offsets_U
            log_sums = logits.logsumexp(-1, keepdim=True)
            missed = (log_sums - logits.gather(1, labels)) * shares
            total += (missed.sum(-1, keepdim=True) * weights).sum()
            slopes = logits.sub_(log_sums).exp_()
            slopes.scatter_add_(1, labels, -shares)
            gradient[piece] = slopes.mul_(weights).to(head_UE.dtype) @ head_UE
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(is_right)
        return total, is_right

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None, None, None, None, None


def common_ids(counts_V: NDArray[np.int64], num_ids: int) -> NDArray[np.int64]:
    """The ids that occur most, rising; ties to the lowest."""
    return np.sort(np.argsort(-counts_V, kind="stable")[:num_ids])
