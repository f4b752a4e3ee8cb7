"""The processors and the noise by their definitions: one draw and one token at a time.

Statistical tests state their false-alarm probability; seeds are fixed, so they either always pass
or always fail.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from bastion_batch.core.noise import position_key
from bastion_batch.engine.history import History
from bastion_batch.engine.noise import gumbel_noise
from bastion_batch.engine.sampling import Draw, choose
from bastion_batch.records import SamplingParams

ALPHA = 1e-4
CPU = torch.device("cpu")


def chi_square_p(observed: Sequence[float], expected: Sequence[float]) -> float:
    """P-value of Pearson's test; cells that expect under five are put together."""
    seen, due = np.asarray(observed, float), np.asarray(expected, float)
    if seen[due == 0].any():
        return 0.0
    small = due < 5
    seen = np.append(seen[~small], seen[small].sum())
    due = np.append(due[~small], due[small].sum())
    seen, due = seen[due > 0], due[due > 0]
    statistic = torch.tensor(((seen - due) ** 2 / due).sum(), dtype=torch.float64)
    freedom = torch.tensor((len(due) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def draw(sampling: SamplingParams, prompt=(), output=(), key=1, position=5, ends=()) -> Draw:
    """Of a row that has committed half of its output; the other half is a path of nodes."""
    half = len(output) // 2
    history = History(prompt, list(output[:half]))
    return Draw(sampling, key, position, history, list(output[half:]), frozenset(ends))


def chosen(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    return choose(logits, draws).tolist()


def surviving_scores(logits: np.ndarray, a_draw: Draw) -> np.ndarray:
    """Processed logits of one draw, `-inf` for what was removed: one token at a time."""
    sampling, scores = a_draw.sampling, [float(x) for x in logits]
    output = [*a_draw.history.output_ids, *a_draw.path_ids]
    for token in range(len(scores)):
        if token in sampling.banned_ids:
            scores[token] = -math.inf
        scores[token] += sum(bias for biased, bias in sampling.logit_bias if biased == token)
        if token in a_draw.end_ids and len(output) < sampling.min_new_tokens:
            scores[token] = -math.inf
        if token in a_draw.history.prompt_ids or token in output:
            penalty = sampling.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        times = output.count(token)
        if times:
            scores[token] -= sampling.presence_penalty + times * sampling.frequency_penalty
    if sampling.temperature == 0:
        return np.array(scores)
    return filtered(np.array([score / sampling.temperature for score in scores]), sampling)


def filtered(scores: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    if sampling.top_k is not None:
        floor = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        scores[scores < floor] = -math.inf
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        mass, floor = 0.0, 0.0
        for probability in sorted(probabilities, reverse=True):
            if mass >= sampling.top_p:
                break
            mass, floor = mass + probability, probability
        scores[probabilities < floor * (1 - 1e-12)] = -math.inf
    scores[probabilities < sampling.min_p * probabilities.max() * (1 - 1e-12)] = -math.inf
    return scores


def slow_choice(logits: np.ndarray, a_draw: Draw) -> int:
    scores = surviving_scores(logits, a_draw)
    if a_draw.sampling.temperature > 0:
        key = position_key(a_draw.noise_key, a_draw.position)
        scores = scores + gumbel_noise([key], len(scores), CPU)[0].double().numpy()
    return int(np.flatnonzero(scores == scores.max())[0])
