"""Sampling: the noise, the processors, ties, and what a choice does not depend on."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import (
    ALPHA,
    CPU,
    chi_square_p,
    chosen,
    draw,
    slow_choice,
    surviving_scores,
)

from bastion_batch.config import parse_job
from bastion_batch.core.noise import position_key, row_key
from bastion_batch.engine.history import History
from bastion_batch.engine.noise import NOISE_RANGE, able_to_win, gumbel_noise, winners
from bastion_batch.engine.sampling import argmax, is_plain_greedy
from bastion_batch.errors import JobFileError
from bastion_batch.records import SamplingParams

proven = settings(derandomize=True, deadline=None, max_examples=200)


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


def test_all_noise_lies_in_its_range():
    """The extremes of the uniform's 32 bits, as they are computed: in float32."""
    uniform = torch.tensor([0.5 * 2.0**-32, 1 - 2.0**-24], dtype=torch.float32)
    largest, smallest = (-(-(-uniform).log1p()).log()).tolist()
    assert NOISE_RANGE[0] < smallest < -2.8
    assert 22.8 < largest < NOISE_RANGE[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0, 40.0, 1e9])
def test_noise_for_those_able_to_win_gives_the_same_winner(scale, dtype):
    """The shortcut against the whole noise, flat to peaked, with ties and removed tokens."""
    generator = torch.Generator().manual_seed(int(scale * 10))
    for num_removed in (0, 3_900, 3_999):
        logits = (scale * torch.randn(20, 4_000, generator=generator)).to(dtype)
        logits[:, 5:9] = logits.max()
        logits[:, torch.randperm(4_000, generator=generator)[:num_removed]] = -torch.inf
        keys = [position_key(num_removed, place) for place in range(20)]
        whole = argmax(logits + gumbel_noise(keys, 4_000, CPU)).tolist()
        for narrow in (False, True):
            assert winners(logits, keys, narrow=[narrow] * 20).tolist() == whole


def test_those_able_to_win_are_few_where_the_best_is_sure():
    logits = torch.full((1_000,), -30.0)
    logits[[3, 700]] = torch.tensor([0.0, -25.0])
    assert able_to_win(logits).tolist() == [3, 700]


@pytest.mark.parametrize("other", [(18, "a", 3), (17, "b", 3), (17, "a", 4), (17, "a\x003", 3)])
def test_every_part_of_a_rows_name_changes_its_key(other):
    assert row_key(*other) != row_key(17, "a", 3)


# The processors, against a slow reading of their definition


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
    "bias": {"temperature": 0.0, "logit_bias": ((3, 2.5), (0, -40.0), (11, 0.75))},
    "bias and temperature": {"temperature": 0.7, "logit_bias": ((3, 2.5), (7, 1.25))},
    "bans": {"temperature": 0.0, "banned_ids": (2, 9, 4)},
    "a ban outweighs a bias": {
        "temperature": 1.0, "banned_ids": (6,), "logit_bias": ((6, 90.0), (5, 90.0)),
    },
    "a minimum length outweighs a bias": {
        "temperature": 0.6, "min_new_tokens": 7, "logit_bias": ((1, 90.0), (5, 90.0), (8, 3.0)),
    },
    "the penalty scales the biased logit": {
        "temperature": 0.0, "repetition_penalty": 1.7, "logit_bias": ((1, -3.0), (3, 4.0)),
    },
    "all": {
        "temperature": 0.8, "top_k": 7, "top_p": 0.871, "min_p": 0.031, "min_new_tokens": 4,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "logit_bias": ((2, 1.5), (8, -0.5)), "banned_ids": (10, 0),
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
    found = chosen(torch.tensor(logits), draws)
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
    assert chosen(torch.tensor(scores[None]), [a_draw]) == [slow_choice(scores, a_draw)]


def test_a_mixed_batch_is_its_draws_one_by_one():
    generator = np.random.default_rng(2)
    logits = torch.tensor(generator.standard_normal((len(PROCESSORS), 30)), dtype=torch.float32)
    before = logits.clone()
    draws = [draw(SamplingParams(**p), (1, 2), [3, 3], key=9) for p in PROCESSORS.values()]
    together = chosen(logits, draws)
    assert torch.equal(logits, before), "the caller's logits are left alone"
    alone = [chosen(logits[[i]], [a_draw])[0] for i, a_draw in enumerate(draws)]
    assert together == alone
    backwards = chosen(logits.flip(0), draws[::-1])
    assert backwards[::-1] == together


def test_a_nucleus_wider_than_a_thousand_tokens_is_exact():
    """Nearly flat over 5,000 tokens: the nucleus is more than what a first look sorts."""
    generator = np.random.default_rng(4)
    logits = 0.1 * generator.standard_normal((3, 5_000))
    draws = [draw(SamplingParams(temperature=1.0, top_p=0.7), key=k) for k in range(3)]
    expected = [slow_choice(*pair) for pair in zip(logits, draws, strict=True)]
    assert chosen(torch.tensor(logits), draws) == expected


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p"])
def test_choices_follow_the_processed_distribution(name):
    """A chi-square of 6,000 draws at `ALPHA`."""
    sampling = SamplingParams(**PROCESSORS[name])
    logits = np.array([0.3, 1.2, -0.4, 0.9, 0.0, 1.1, -2.0, 0.5])
    scores = surviving_scores(logits, draw(sampling))
    law = np.exp(scores) / np.exp(scores).sum()
    draws = [draw(sampling, key=row_key(0, str(n), 0)) for n in range(6_000)]
    found = chosen(torch.tensor(logits, dtype=torch.float32).expand(len(draws), -1), draws)
    counts = np.bincount(found, minlength=len(law))
    assert chi_square_p(counts, len(draws) * law) > ALPHA


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 130])
def test_any_number_of_draws_at_once_is_one_by_one(rows):
    """Also in bfloat16, of whose logits several tie."""
    generator = np.random.default_rng(rows)
    params = [SamplingParams(**p) for p in PROCESSORS.values()]
    logits = torch.tensor(generator.standard_normal((rows, 200)), dtype=torch.bfloat16)
    draws = [draw(params[n % len(params)], (1,), [3, 4, 3], key=n) for n in range(rows)]
    alone = [chosen(logits[[n]], [a_draw])[0] for n, a_draw in enumerate(draws)]
    assert chosen(logits, draws) == alone


@proven
@given(
    st.lists(st.integers(0, 9), max_size=5),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4)), max_size=5),
)
def test_a_history_counts_as_if_it_were_counted_anew(prompt, moves):
    """Committed tokens and paths in any order: a path is forgotten, a commit is not."""
    output: list[int] = []
    history = History(prompt, output)
    for is_commit, token_ids in moves:
        if is_commit:
            output.extend(token_ids)
        whole = output if is_commit else [*output, *token_ids]
        found = history.counts([] if is_commit else token_ids)
        counts = dict(zip(found.ids.tolist(), found.times.tolist(), strict=True))
        assert len(counts) == len(found.ids)
        assert counts == {token: whole.count(token) for token in {*prompt, *whole}}


GREEDY_BUT = [
    {"temperature": 0.1}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1}, {"min_new_tokens": 1}, {"banned_ids": (1,)},
    {"logit_bias": ((1, 0.5),)},
]  # fmt: skip


@pytest.mark.parametrize("sampling", GREEDY_BUT, ids=str)
def test_what_moves_the_argmax_is_not_plain_greedy(sampling):
    assert is_plain_greedy(SamplingParams(top_k=3, top_p=0.5, min_p=0.5, stop_token_ids=(2,)))
    assert not is_plain_greedy(SamplingParams(**sampling))


# Parameters that no target can serve

FAULTS = {
    "logit_bias names token 97; the target's vocabulary has 97": {"logit_bias": ((97, 1.0),)},
    "banned_ids names token -1; the target's vocabulary has 97": {"banned_ids": (3, -1)},
    "stop_token_ids names token 100; the target's": {"stop_token_ids": (100,)},
    "holds back are 97 tokens; the target's vocabulary has 97": {"banned_ids": tuple(range(97))},
    "and one must be left": {"banned_ids": tuple(range(2, 97)), "min_new_tokens": 1},
}


@pytest.mark.parametrize("message", FAULTS)
def test_parameters_that_leave_no_token_are_refused_with_the_limit(message):
    fault = SamplingParams(**FAULTS[message]).fault(97, frozenset({0, 1}))
    assert fault is not None
    assert message in fault


@pytest.mark.parametrize(
    "sampling",
    [
        {"banned_ids": tuple(range(2, 97))},
        {"banned_ids": tuple(range(2, 97)), "min_new_tokens": 1, "ignore_eos": True},
        {"logit_bias": ((0, -1.0), (96, 1.0)), "stop_token_ids": (96,)},
    ],
    ids=["all but the ends", "ends that do not end", "first and last"],
)
def test_parameters_that_leave_a_token_are_not(sampling):
    assert SamplingParams(**sampling).fault(97, frozenset({0, 1})) is None


def test_stop_tokens_end_an_output_also_where_the_targets_own_do_not():
    own = frozenset({1})
    assert SamplingParams().end_ids(own) == {1}
    assert SamplingParams(stop_token_ids=(5,)).end_ids(own) == {1, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).end_ids(own) == {5}


# From the job file


def decoding_of(**fields) -> SamplingParams:
    tree = {
        "input": {"path": "a", "prompt": "p"},
        "output": {"path": "o"},
        "model": {"target": "t"},
    }
    return parse_job({**tree, "decoding": fields}).decoding.sampling


def test_a_job_gives_token_ids_as_a_mapping_and_lists():
    sampling = decoding_of(logit_bias={"7": 1, 3: -2.5}, banned_ids=[5, 2, 5], stop_token_ids=[9])
    assert sampling.logit_bias == ((3, -2.5), (7, 1.0))
    assert (sampling.banned_ids, sampling.stop_token_ids) == ((2, 5), (9,))
    assert hash(sampling) == hash(decoding_of(
        stop_token_ids=[9], banned_ids=[2, 5], logit_bias={3: -2.5, 7: 1.0}
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {3: math.nan}}, "decoding.logit_bias.0.1: Input should be a finite number"),
        ({"presence_penalty": math.inf}, "decoding.presence_penalty: Input should be a finite"),
        ({"banned_ids": [-1]}, "decoding.banned_ids.0: Input should be greater than or equal to 0"),
        ({"logit_bias": [[3, 1], [3, 2]]}, "decoding.logit_bias: token 3 has more than one bias"),
    ],
    ids=str,
)
def test_a_job_with_impossible_token_ids_is_refused(fields, message):
    with pytest.raises(JobFileError, match=re.escape(message)):
        decoding_of(**fields)


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
        assert chosen(logits, [draw(SamplingParams())] * num_rows) == lowest
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
