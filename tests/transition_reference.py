"""The heads that score a slot's candidates by what comes before, from their published formulas.

One path at a time, float64; without the code under test. The blocks are `drafter_reference`'s.
"""

import torch
from drafter_fixtures import MASK, VOCAB, Meaning
from torch import Tensor

HEADS = ("candidate_selector.", "markov_head.")


def louder(tensors: dict[str, Tensor], factor: float = 4.0) -> dict[str, Tensor]:
    """The same weights, but heads whose scores no tolerance can hide."""
    return {
        name: factor * value if name.startswith(HEADS) else value for name, value in tensors.items()
    }


def added(
    tensors: dict[str, Tensor], meaning: Meaning, hidden_WE: Tensor, path: list[int], root: int
) -> Tensor:
    """What a head adds to the scores of all draft ids of the slot after a path of tokens.

    Args:
        tensors: under normalised names.
        meaning: of the file.
        hidden_WE: of the block, after the final norm.
        path: the target's ids of the drafted tokens before the slot.
        root: the token before them.
    """
    w = {name.removesuffix(".weight"): value.double() for name, value in tensors.items()}
    slot = meaning.first_slot + len(path)
    y, before = hidden_WE[slot], [root, *path]
    if meaning.selector:
        left = w["candidate_selector.predecessor_codebook"][before[-1]]
        left = left * (w["candidate_selector.hidden_projection"] @ y)
        return w["candidate_selector.successor_codebook"] @ left
    assert meaning.markov
    w1, w2 = w["markov_head.markov_w1"], w["markov_head.markov_w2"]
    kind, _ = meaning.markov
    if kind == "vanilla":
        return w2 @ w1[before[-1]]
    if kind == "gated":
        joint = torch.cat([y, w1[before[-1]]])
        gate = w["markov_head.gate_proj"] @ joint + w["markov_head.gate_proj.bias"]
        return w2 @ (gate.sigmoid() * w1[before[-1]])
    # The state passes through every slot; one that predicts nothing comes after the root too.
    state = output = torch.zeros(w1.shape[1], dtype=torch.float64)
    tokens = [root] * meaning.first_slot + before
    for y, token in zip(hidden_WE, tokens, strict=False):
        joint = torch.cat([state, w1[token], y])
        raw = w["markov_head.joint_proj"] @ joint + w["markov_head.joint_proj.bias"]
        gate, candidate, output = raw.chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
    return w2 @ output.tanh()


def log_probs(
    tensors: dict[str, Tensor],
    meaning: Meaning,
    hidden_WE: Tensor,
    logits_WU: Tensor,
    path: list[int],
    root: int,
) -> dict[int, float]:
    """Log-probability of every candidate of the slot after a path, by the target's id.

    DFlash 2: normalised over the candidates. DSpark: over the vocabulary, whose other tokens stay
    as they are without the head.
    """
    ids = torch.tensor(meaning.ids or range(VOCAB))
    logits = logits_WU[meaning.first_slot + len(path)].clone()
    logits[ids == MASK] = -torch.inf
    num_candidates = meaning.selector[1] if meaning.selector else 32
    best = logits.topk(min(num_candidates, len(ids))).indices
    scores = logits[best] + added(tensors, meaning, hidden_WE, path, root)[best]
    everything = scores
    if meaning.markov:
        is_other = torch.ones(len(ids), dtype=torch.bool)
        is_other[best] = False
        everything = torch.cat([scores, logits[is_other]])
    values = scores - everything.logsumexp(0)
    return dict(zip(ids[best].tolist(), values.tolist(), strict=True))
