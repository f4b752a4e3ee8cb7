"""The law of the engine's first three tokens, jointly, is the target's.

Every test is a chi-square at `ALPHA` = 1e-4 over all joint outcomes on a tiny vocabulary, against
transformers' own logits after every path. The fast suite takes 2,000 rows of each law; the slow one
20,000 rows. Seeds are fixed.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from sampling_reference import ALPHA, chi_square_p, chosen, draw, surviving_scores
from tiny import SIZES, fixed_costs
from transformers import LlamaConfig, LlamaForCausalLM

from bastion_batch.core.noise import row_key
from bastion_batch.engine import Engine
from bastion_batch.engine.buckets import coarse
from bastion_batch.engine.drafters.fakes import RandomDrafter, ScriptedDrafter
from bastion_batch.engine.sampling import Draw, argmax, choose
from bastion_batch.engine.step import PassLayout
from bastion_batch.engine.target import Target
from bastion_batch.records import Request, SamplingParams

VOCAB, PROMPT, LENGTH = 7, (3, 6), 3
FEW, MANY = 2_000, 20_000
"""Rows: in the fast suite, and in the slow one."""

Path = tuple[int, ...]
Law = dict[Path, float]

PARAMS = {
    "plain": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 5},
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
    "bias and bans": {"logit_bias": ((1, 1.0), (2, -0.5)), "banned_ids": (4,)},
    "all": {
        "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.2,
        "logit_bias": ((0, 0.7), (4, -0.3)), "banned_ids": (2,),
    },
}  # fmt: skip
IN_FAST_SUITE = ["top-p", "repetition", "all"]


def sampling_of(name: str) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True, **PARAMS[name]}
    )


@pytest.fixture(scope="module")
def module():
    """Small weights: every token has a fair chance."""
    torch.manual_seed(5)
    sizes = {**SIZES, "initializer_range": 0.15}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(torch.float64).eval()


@pytest.fixture(scope="module")
def logits_after(module) -> dict[Path, np.ndarray]:
    """transformers' own logits after every path shorter than three tokens."""
    paths = [path for n in range(LENGTH) for path in product(range(VOCAB), repeat=n)]
    with torch.inference_mode():
        return {p: module(torch.tensor([PROMPT + p])).logits[0, -1].numpy() for p in paths}


def law_of(logits_after: dict[Path, np.ndarray], sampling: SamplingParams) -> Law:
    """The exact probability of every three-token output."""
    following = {}
    for path, logits in logits_after.items():
        scores = surviving_scores(logits, draw(sampling, PROMPT, path))
        following[path] = np.exp(scores) / np.exp(scores).sum()
    result = {
        path: math.prod(following[path[:n]][path[n]] for n in range(LENGTH))
        for path in product(range(VOCAB), repeat=LENGTH)
    }
    assert sum(result.values()) == pytest.approx(1)
    assert sum(p > 5 / FEW for p in result.values()) > 40, "a law with something to test"
    return result


def fit_of(outputs: Sequence[Path], law: Law) -> float:
    """P-value of the outputs under the law: all three tokens jointly."""
    counts = Counter(outputs)
    assert counts.keys() <= law.keys()
    return chi_square_p([counts[path] for path in law], [len(outputs) * p for p in law.values()])


def requests_of(sampling: SamplingParams, num_rows: int) -> list[Request]:
    return [
        Request(
            row_id=str(row), prompt_ids=PROMPT, sampling=sampling,
            noise_key=row_key(0, str(row), 0),
        )
        for row in range(num_rows)
    ]  # fmt: skip


def engine_outputs(module, drafter, method: str, wanted: list[Request], **options) -> list[Path]:
    target = Target.of_module(module)
    engine = Engine(
        target, drafter, method=method, max_batch=128, costs=fixed_costs(target), **options
    )
    found = {completion.row_id: completion.output_ids for completion in engine.generate(wanted)}
    if drafter is not None:
        assert engine.totals.num_accepted > len(wanted) / 50, "trees are walked, not only roots"
    return [found[request.row_id] for request in wanted]


def random_drafter() -> RandomDrafter:
    return RandomDrafter(VOCAB, depth=2, num_ranks=VOCAB)


@pytest.mark.parametrize("name", IN_FAST_SUITE)
def test_outputs_of_random_trees_follow_the_targets_law(module, logits_after, name):
    """And are the plain walk's over transformers' logits, token for token."""
    sampling = sampling_of(name)
    outputs = engine_outputs(module, random_drafter(), "bastion", requests_of(sampling, FEW))
    assert fit_of(outputs, law_of(logits_after, sampling)) > ALPHA
    assert outputs == walked(logits_after, sampling, chosen, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bastion", "ddtree", "ar"])
@pytest.mark.parametrize("name", PARAMS)
def test_many_outputs_follow_the_targets_law(module, logits_after, name, method):
    sampling = sampling_of(name)
    drafter = None if method == "ar" else random_drafter()
    outputs = engine_outputs(module, drafter, method, requests_of(sampling, MANY))
    assert fit_of(outputs, law_of(logits_after, sampling)) > ALPHA


def test_trees_that_know_the_outcome_change_no_sample(module, logits_after):
    """All rows share a prompt, so the oracle knows one row's output: the most common one."""
    sampling = sampling_of("all")
    plain = walked(logits_after, sampling, chosen, 500)
    script = Counter(plain).most_common(1)[0][0]
    drafter = ScriptedDrafter({PROMPT: script}, VOCAB, depth=2)
    assert engine_outputs(module, drafter, "bastion", requests_of(sampling, 500)) == plain


def test_drawing_at_every_node_at_once_changes_no_sample(module, logits_after):
    sampling = sampling_of("all")
    outputs = engine_outputs(
        module,
        random_drafter(),
        "ddtree",
        requests_of(sampling, 500),
        layout=PassLayout(draw_all=True, bucket=coarse),
    )
    assert outputs == walked(logits_after, sampling, chosen, 500)


# The test itself must see a fault

Walk = Callable[[torch.Tensor, list[Draw]], list[int]]
"""Logits after the path of every row, and the draws due there -> the tokens that come next."""


def walked(
    logits_after: dict[Path, np.ndarray], sampling: SamplingParams, walk: Walk, num_rows: int
) -> list[Path]:
    """Three tokens for every row, walked over transformers' logits."""
    paths: list[Path] = [()] * num_rows
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        logits = torch.tensor(np.stack([logits_after[path] for path in paths]))
        draws = [
            draw(sampling, PROMPT, path, key=row_key(0, str(row), 0), position=position)
            for row, path in enumerate(paths)
        ]
        paths = [(*path, token) for path, token in zip(paths, walk(logits, draws), strict=True)]
    return paths


def argmax_walk(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Accepts along the target's argmax and samples only the last token."""
    is_last = draws[0].num_output == LENGTH - 1
    return (choose(logits, draws) if is_last else argmax(logits)).tolist()


def noise_of_the_root(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Draws every node of a tree with the noise of the root's position."""
    return chosen(logits, [a_draw._replace(position=len(PROMPT)) for a_draw in draws])


def without_processors(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Forgets filters, penalties, bias and bans."""
    return chosen(
        logits, [a_draw._replace(sampling=SamplingParams(temperature=1.0)) for a_draw in draws]
    )


def without_the_path(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Penalises by the root's history alone."""
    draws = [draw(d.sampling, PROMPT, (), d.noise_key, d.position) for d in draws]
    return chosen(logits, draws)


FAULTS = [
    ("plain", argmax_walk), ("plain", noise_of_the_root),
    ("top-p", argmax_walk), ("top-p", noise_of_the_root), ("top-p", without_processors),
    ("top-k", without_processors), ("repetition", without_processors),
    ("repetition", without_the_path), ("presence and frequency", without_the_path),
    ("filters", without_processors), ("bias and bans", without_processors),
    ("all", argmax_walk), ("all", noise_of_the_root), ("all", without_the_path),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_law_test_sees_a_fault(logits_after, name, fault):
    sampling = sampling_of(name)
    assert (
        fit_of(walked(logits_after, sampling, fault, FEW), law_of(logits_after, sampling)) < ALPHA
    )
