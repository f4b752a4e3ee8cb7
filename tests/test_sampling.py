"""Sampling: the noise, the processors, ties, and the law of the engine's own first tokens.

Statistical tests state their false-alarm probability; seeds are fixed, so they either always pass
or always fail.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SIZES, fixed_costs
from transformers import LlamaConfig, LlamaForCausalLM

from bastion_batch.core.noise import position_key, row_key
from bastion_batch.engine import Engine
from bastion_batch.engine.drafters.fakes import RandomDrafter, ScriptedDrafter
from bastion_batch.engine.sampling import Draw, argmax, choose, gumbel_noise
from bastion_batch.engine.target import Target
from bastion_batch.records import Request, SamplingParams

ALPHA = 1e-4
CPU = torch.device("cpu")
proven = settings(derandomize=True, deadline=None, max_examples=200)


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


# The noise


def standard(noise: torch.Tensor) -> np.ndarray:
    """What is uniform in (0, 1) if the noise is standard Gumbel."""
    return np.exp(-np.exp(-noise.double().numpy())).ravel()


VIEWS = {
    "ids of one position": lambda: gumbel_noise([position_key(3, 7)], 200_000, CPU),
    "positions of one row": lambda: gumbel_noise(
        [position_key(5, p) for p in range(50_000)], 4, CPU
    )[:, 2],
    "rows at one position": lambda: gumbel_noise(
        [position_key(row_key(0, f"f00000-{n:012d}", 0), 9) for n in range(50_000)], 4, CPU
    )[:, 0],
    "raw keys in sequence": lambda: gumbel_noise(range(50_000), 4, CPU)[:, 1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_noise_is_standard_gumbel(view):
    """Kolmogorov-Smirnov at `ALPHA`, along every axis on its own."""
    values = np.sort(standard(VIEWS[view]()))
    steps = np.arange(len(values) + 1) / len(values)
    distance = max((steps[1:] - values).max(), (values - steps[:-1]).max())
    assert distance < math.sqrt(math.log(2 / ALPHA) / (2 * len(values)))


def test_the_upper_tail_is_there():
    """Where tokens win: P(g > 8) = 3.4e-4, a chi-square with one degree at `ALPHA`."""
    noise = gumbel_noise([position_key(1, p) for p in range(100)], 20_000, CPU)
    for level in (4.0, 8.0, 11.0):
        expected = noise.numel() * -math.expm1(-math.exp(-level))
        seen = int((noise > level).sum())
        assert abs(seen - expected) < 3.9 * math.sqrt(expected)


def pairs(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of neighbours: next position, next row, next token id, next position and id."""
    keys = [position_key(11, p) for p in range(401)]
    noise = gumbel_noise(keys, 401, CPU)
    others = gumbel_noise([position_key(12, p) for p in range(401)], 401, CPU)
    return {
        "position": (noise[:-1], noise[1:]),
        "row": (noise, others),
        "token id": (noise[:, :-1], noise[:, 1:]),
        "diagonal": (noise[:-1, :-1], noise[1:, 1:]),
        "antidiagonal": (noise[:-1, 1:], noise[1:, :-1]),
    }[kind]


@pytest.mark.parametrize("kind", ["position", "row", "token id", "diagonal", "antidiagonal"])
def test_neighbours_are_independent(kind):
    """A chi-square over 8 x 8 joint octiles at `ALPHA`."""
    one, other = (np.minimum((8 * standard(part)).astype(int), 7) for part in pairs(kind))
    cells = np.bincount(8 * one + other, minlength=64)
    assert chi_square_p(cells, np.full(64, len(one) / 64)) > ALPHA


def test_noise_is_a_function_of_key_and_id_alone():
    keys = [position_key(7, p) for p in range(5)]
    together = gumbel_noise(keys, 100, CPU)
    assert torch.equal(together, gumbel_noise(keys, 100, CPU))
    for place in (3, 0, 4):
        assert torch.equal(gumbel_noise([keys[place]], 1000, CPU)[0, :100], together[place])
    assert torch.equal(gumbel_noise(keys[::-1], 100, CPU).flip(0), together)


def test_noise_is_finite_for_every_key():
    noise = gumbel_noise([0, 1, 2**63 - 1, 2**63, 2**64 - 1], 200_000, CPU)
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()
    assert -3 < noise.min() < -2
    assert 11 < noise.max() < 23


def test_the_noise_of_this_version_is_pinned():
    """A change of any of these is a new `NOISE_VERSION`: texts of running jobs would change."""
    key = row_key(17, "f00000-000000000012", 3)
    assert key == PINNED_ROW_KEY
    assert position_key(key, 41) == PINNED_POSITION_KEY
    noise = gumbel_noise([position_key(key, 41)], 49_152, CPU)[0]
    assert noise[[0, 1, 2, 49_151]].tolist() == pytest.approx(PINNED_NOISE, abs=1e-6)


PINNED_ROW_KEY = 15491746217931437648
PINNED_POSITION_KEY = 8983945798284430074
PINNED_NOISE = [-0.558414, -0.461257, 0.535019, 0.961606]


@pytest.mark.parametrize("other", [(18, "a", 3), (17, "b", 3), (17, "a", 4), (17, "a\x003", 3)])
def test_every_part_of_a_rows_name_changes_its_key(other):
    assert row_key(*other) != row_key(17, "a", 3)


# The processors, against a slow reading of their definition


def draw(sampling: SamplingParams, prompt=(), output=(), key=1, position=5, ends=()) -> Draw:
    return Draw(sampling, key, position, prompt, output, frozenset(ends))


def surviving_scores(logits: np.ndarray, a_draw: Draw) -> np.ndarray:
    """Processed logits of one draw, `-inf` for what was removed: one token at a time."""
    sampling, scores = a_draw.sampling, [float(x) for x in logits]
    for token in range(len(scores)):
        if token in a_draw.end_ids and len(a_draw.output_ids) < sampling.min_new_tokens:
            scores[token] = -math.inf
        if token in a_draw.prompt_ids or token in a_draw.output_ids:
            penalty = sampling.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        times = list(a_draw.output_ids).count(token)
        if times:
            scores[token] -= sampling.presence_penalty + times * sampling.frequency_penalty
    if sampling.temperature == 0:
        return np.array(scores)
    scores = np.array([score / sampling.temperature for score in scores])
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


PROCESSORS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-k of more than all": {"temperature": 1.0, "top_k": 99},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.613},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.3, "min_p": 0.217},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "reward": {"temperature": 1.0, "repetition_penalty": 0.6},
    "presence": {"temperature": 0.0, "presence_penalty": 0.9},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.4},
    "negative": {"temperature": 1.0, "frequency_penalty": -0.4, "presence_penalty": -0.3},
    "minimum length": {"temperature": 0.0, "min_new_tokens": 4},
    "all": {
        "temperature": 0.8, "top_k": 7, "top_p": 0.871, "min_p": 0.031, "min_new_tokens": 4,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_is_its_definition(name, whole):
    """Random and tied logits, histories of 0 to 6 tokens, both end ids, many draws at once."""
    generator = np.random.default_rng(sum(map(ord, name)))
    sampling = SamplingParams(**PROCESSORS[name])
    logits = 2 * generator.standard_normal((40, 12))
    if whole:
        logits = np.round(logits)
    draws = [
        draw(
            sampling,
            prompt=tuple(generator.integers(0, 12, 3).tolist()),
            output=generator.integers(0, 12, int(generator.integers(0, 7))).tolist(),
            key=int(generator.integers(2**62)),
            position=int(generator.integers(1000)),
            ends=(1, 5),
        )
        for _ in logits
    ]
    found = choose(torch.tensor(logits), draws)
    assert found == [slow_choice(*pair) for pair in zip(logits, draws, strict=True)]


@proven
@given(
    st.lists(st.integers(-400, 400), min_size=6, max_size=6),
    st.floats(0.2, 2),
    st.none() | st.integers(1, 7),
    st.integers(50, 999).map(lambda n: n / 1000 + 0.00023),
    st.integers(0, 900).map(lambda n: n / 1000 + 0.00013),
    st.lists(st.integers(0, 5), max_size=5),
)
def test_any_mix_of_processors_is_its_definition(logits, temperature, top_k, top_p, min_p, output):
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, presence_penalty=0.37,
        repetition_penalty=1.13, min_new_tokens=2,
    )  # fmt: skip
    a_draw = draw(sampling, prompt=(0, 1), output=output, key=len(output), ends=(4,))
    scores = np.array(logits) / 100
    assert choose(torch.tensor(scores[None]), [a_draw]) == [slow_choice(scores, a_draw)]


def test_a_mixed_batch_is_its_draws_one_by_one():
    generator = np.random.default_rng(2)
    logits = torch.tensor(generator.standard_normal((len(PROCESSORS), 30)), dtype=torch.float32)
    before = logits.clone()
    draws = [draw(SamplingParams(**p), (1, 2), [3, 3], key=9) for p in PROCESSORS.values()]
    together = choose(logits, draws)
    assert torch.equal(logits, before), "the caller's logits are left alone"
    alone = [choose(logits[[i]], [a_draw])[0] for i, a_draw in enumerate(draws)]
    assert together == alone
    backwards = choose(logits.flip(0), draws[::-1])
    assert backwards[::-1] == together


def test_a_nucleus_wider_than_a_thousand_tokens_is_exact():
    """Nearly flat over 5,000 tokens: the nucleus is more than what a first look sorts."""
    generator = np.random.default_rng(4)
    logits = 0.1 * generator.standard_normal((3, 5_000))
    draws = [draw(SamplingParams(temperature=1.0, top_p=0.7), key=k) for k in range(3)]
    expected = [slow_choice(*pair) for pair in zip(logits, draws, strict=True)]
    assert choose(torch.tensor(logits), draws) == expected


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p"])
def test_choices_follow_the_processed_distribution(name):
    """A chi-square of 6,000 draws at `ALPHA`."""
    sampling = SamplingParams(**PROCESSORS[name])
    logits = np.array([0.3, 1.2, -0.4, 0.9, 0.0, 1.1, -2.0, 0.5])
    scores = surviving_scores(logits, draw(sampling))
    law = np.exp(scores) / np.exp(scores).sum()
    draws = [draw(sampling, key=row_key(0, str(n), 0)) for n in range(6_000)]
    chosen = choose(torch.tensor(logits, dtype=torch.float32).expand(len(draws), -1), draws)
    counts = np.bincount(chosen, minlength=len(law))
    assert chi_square_p(counts, len(draws) * law) > ALPHA


# Ties


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_lowest_of_tied_ids_wins(dtype):
    """Exact ties at random places of 49,152 logits; in bfloat16 3 % of positions have them."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 2, 7, 33):
        logits = torch.randn(num_rows, 49_152, generator=generator).to(dtype)
        lowest = []
        for row in range(num_rows):
            count = int(torch.randint(1, 5, (), generator=generator))
            places = torch.randint(0, 49_152, (count,), generator=generator)
            logits[row, places] = 9.0
            lowest.append(int(places.min()))
        assert argmax(logits).tolist() == lowest
        assert choose(logits, [draw(SamplingParams())] * num_rows) == lowest
        wide = torch.cat([logits, torch.full((num_rows, 100), 10.0, dtype=dtype)], 1)
        assert argmax(wide[:, :49_152]).tolist() == lowest, "also of a slice of a padded head"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_neighbouring_ties_and_flat_logits(dtype):
    assert argmax(torch.zeros(3, 49_152, dtype=dtype)).tolist() == [0, 0, 0]
    for place in (*range(70), 4_095, 8_191, 49_150):
        logits = torch.zeros(1, 49_152, dtype=dtype)
        logits[0, place : place + 2] = 1.0
        assert argmax(logits).tolist() == [place]
    almost_all_banned = torch.full((1, 49_152), -math.inf, dtype=dtype)
    almost_all_banned[0, [77, 40_000]] = -5.0
    assert argmax(almost_all_banned).tolist() == [77]


# The engine's law

VOCAB, PROMPT, LENGTH = 6, (3,), 3
SAMPLING = SamplingParams(
    temperature=1.0, top_k=5, top_p=0.9, max_new_tokens=LENGTH, ignore_eos=True
)
NUM_ROWS = 4_000
"""Three tokens each, plainly and with trees: 24,000 draws."""

Path = tuple[int, ...]


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


@pytest.fixture(scope="module")
def law(logits_after) -> dict[Path, float]:
    """The exact probability of every three-token output."""
    following = {}
    for path, logits in logits_after.items():
        scores = surviving_scores(logits, draw(SAMPLING))
        following[path] = np.exp(scores) / np.exp(scores).sum()
    result = {
        path: math.prod(following[path[:n]][path[n]] for n in range(LENGTH))
        for path in product(range(VOCAB), repeat=LENGTH)
    }
    assert sum(result.values()) == pytest.approx(1)
    assert sum(p > 5 / NUM_ROWS for p in result.values()) > 40, "a law with something to test"
    return result


def fit_of(outputs: Sequence[Path], law: dict[Path, float]) -> float:
    """P-value of the outputs under the law: all three tokens jointly."""
    counts = Counter(outputs)
    assert counts.keys() <= law.keys()
    return chi_square_p([counts[path] for path in law], [len(outputs) * p for p in law.values()])


def noise_keys() -> list[int]:
    return [row_key(0, str(row), 0) for row in range(NUM_ROWS)]


def engine_outputs(module, drafter, method: str, keys: list[int]) -> list[Path]:
    target = Target.of_module(module)
    engine = Engine(target, drafter, method=method, max_batch=128, costs=fixed_costs(target))
    wanted = [
        Request(row_id=str(row), prompt_ids=PROMPT, sampling=SAMPLING, noise_key=key)
        for row, key in enumerate(keys)
    ]
    found = {completion.row_id: completion.output_ids for completion in engine.generate(wanted)}
    if drafter is not None:
        assert engine.totals.num_accepted > len(keys) / 4, "trees are walked, not only roots"
    return [found[request.row_id] for request in wanted]


@pytest.fixture(scope="module")
def plain_outputs(module) -> list[Path]:
    return engine_outputs(module, None, "ar", noise_keys())


def test_plain_outputs_follow_the_targets_law(plain_outputs, law):
    """Chi-square of the first three tokens jointly; false alarm `ALPHA` = 1e-4."""
    assert fit_of(plain_outputs, law) > ALPHA


def test_outputs_of_random_trees_follow_the_targets_law(module, law):
    """Other noise than the plain test's, so that it is a test of its own; false alarm 1e-4."""
    keys = [key ^ 0x5DEECE66D for key in noise_keys()]
    drafter = RandomDrafter(VOCAB, depth=2, num_ranks=VOCAB)
    assert fit_of(engine_outputs(module, drafter, "bastion", keys), law) > ALPHA


def test_an_oracles_trees_change_no_sample(module, plain_outputs):
    """All rows share a prompt, so the oracle knows one row's output: the most common one."""
    script = Counter(plain_outputs).most_common(1)[0][0]
    drafter = ScriptedDrafter({PROMPT: script}, VOCAB, depth=2)
    target = Target.of_module(module)
    engine = Engine(target, drafter, method="bastion", max_batch=128, costs=fixed_costs(target))
    keys = noise_keys()[:500]
    wanted = [
        Request(row_id=str(row), prompt_ids=PROMPT, sampling=SAMPLING, noise_key=key)
        for row, key in enumerate(keys)
    ]
    found = {c.row_id: c.output_ids for c in engine.generate(wanted)}
    assert [found[request.row_id] for request in wanted] == plain_outputs[: len(keys)]
    assert engine.totals.num_accepted > 0


Walk = Callable[[torch.Tensor, list[Draw]], list[int]]
"""Logits after the path of every row, and the draws due there -> the tokens that come next."""


def walked(logits_after: dict[Path, np.ndarray], walk: Walk, num_rows: int) -> list[Path]:
    """Three tokens for every row, walked over transformers' logits."""
    paths: list[Path] = [()] * num_rows
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        logits = torch.tensor(np.stack([logits_after[path] for path in paths]))
        draws = [
            draw(SAMPLING, key=key, position=position, output=path)
            for key, path in zip(noise_keys(), paths, strict=False)
        ]
        paths = [(*path, token) for path, token in zip(paths, walk(logits, draws), strict=True)]
    return paths


def argmax_walk(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Accepts along the target's argmax and samples only the last token."""
    is_last = len(draws[0].output_ids) == LENGTH - 1
    return choose(logits, draws) if is_last else argmax(logits).tolist()


def noise_of_the_root(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Draws every node of a tree with the noise of the root's position."""
    return choose(logits, [a_draw._replace(position=len(PROMPT)) for a_draw in draws])


def no_filter(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Forgets the nucleus."""
    return choose(
        logits, [a_draw._replace(sampling=SamplingParams(temperature=1.0)) for a_draw in draws]
    )


@pytest.mark.parametrize("fault", [argmax_walk, noise_of_the_root, no_filter])
def test_the_law_test_sees_a_fault(logits_after, law, fault):
    assert fit_of(walked(logits_after, fault, 2_000), law) < ALPHA


def test_the_law_test_passes_an_honest_walk_which_is_the_engines(logits_after, law, plain_outputs):
    honest = walked(logits_after, choose, 2_000)
    assert fit_of(honest, law) > ALPHA
    assert honest == plain_outputs[:2_000]
