"""Stairs: how passes are counted, when stairs are found, and what that does to predictions."""

import numpy as np
import pytest
from synthetic_devices import LLAMA, SPEED

from bastion_batch.core.fitting import fit_stairs
from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import PassLoad, Timing
from bastion_batch.core.stairs import Stairs

SIZES = (1, 2, 4, 8, 9, 16, 17, 32, 33, 48, 64, 65)
WEIGHTS_SECONDS, TILE_SECONDS = 0.030, 0.009


def seconds(num_tokens, tile=16):
    """Weights, and every further tile of tokens."""
    return WEIGHTS_SECONDS + TILE_SECONDS * (np.ceil(num_tokens / tile) - 1)


def timings(take, sizes=SIZES, noise=0.0):
    random = np.random.default_rng(0)
    return [
        Timing(n, 1, 128, float(take(n)) * (1 + noise * random.standard_normal())) for n in sizes
    ]


@pytest.mark.parametrize(
    ("tokens", "share", "counted"),
    [(1, 1.0, 16), (16, 1.0, 16), (17, 1.0, 32), (17, 0.5, 24.5), (17, 0.0, 17), (32, 0.5, 32)],
)
def test_a_pass_counts_for_part_of_the_tile_that_it_enters(tokens, share, counted):
    assert Stairs(16, share).counted(tokens) == counted


def test_what_attention_does_is_not_rounded():
    load = PassLoad.packed([3, 14], [100, 200], num_logits=5)
    counted = Stairs(16, 1.0).of(load)
    assert (counted.num_tokens, counted.num_logits) == (32, 16)
    assert counted[1:4] == load[1:4]


def test_no_stairs_change_nothing():
    tokens_N = np.arange(1.0, 300.0)
    assert np.array_equal(Stairs().counted(tokens_N), tokens_N)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("tile", [16, 32])
def test_stairs_are_found_in_timings(tile, noise):
    found = fit_stairs(LLAMA, SPEED, timings(lambda n: seconds(n, tile), noise=noise))
    assert found.tile == tile
    assert found.share >= 0.9


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize(
    "take",
    [lambda n: 0.03 + 0.0006 * n, lambda n: 0.03, lambda n: max(0.03, 0.001 * n)],
    ids=["a line", "flat", "a bend"],
)
def test_none_are_found_where_there_are_none(take, noise):
    assert fit_stairs(LLAMA, SPEED, timings(take, noise=noise)) == Stairs()


def test_too_few_sizes_say_nothing():
    assert fit_stairs(LLAMA, SPEED, timings(seconds, (1, 16, 17, 32, 33))) == Stairs()
    assert fit_stairs(LLAMA, SPEED, []) == Stairs()


def test_a_model_predicts_the_edge_and_the_size_behind_it():
    model = LatencyModel(LLAMA, SPEED)
    model.fit(timings(seconds))
    tokens_N = np.arange(1.0, 65.0)
    predicted = model.seconds(tokens_N, 1, 128)
    assert np.abs(predicted / seconds(tokens_N) - 1).max() < 0.06
    assert predicted[16] > 1.15 * predicted[15], "17 tokens against 16"
    assert predicted[31] < 1.04 * predicted[16], "32 against 17"


def test_one_size_of_a_stair_tells_of_the_others():
    model = LatencyModel(LLAMA, SPEED)
    model.fit(timings(seconds))
    for _ in range(60):
        model.observe(PassLoad.of(30, 1, 128), 1.3 * float(seconds(30)))
    assert model.seconds(18, 1, 128) == pytest.approx(1.3 * float(seconds(18)), rel=0.05)


def test_stairs_are_kept_with_the_rest():
    model = LatencyModel(LLAMA, SPEED)
    model.fit(timings(seconds))
    again = LatencyModel.from_dict(LLAMA, model.to_dict())
    assert again.stairs == model.stairs != Stairs()
    assert again.seconds(17, 1, 128) == pytest.approx(model.seconds(17, 1, 128), rel=1e-3)
    assert model.summary()["stairs"] == model.stairs._asdict()


@pytest.mark.parametrize("stairs", [[0, 1.0], [16, 1.5], [16, -0.1], [16], ["x", 1], [1e999, 0.5]])
def test_impossible_stairs_are_not_read(stairs):
    data = LatencyModel(LLAMA, SPEED).to_dict()
    with pytest.raises((ValueError, TypeError)):
        LatencyModel.from_dict(LLAMA, {**data, "stairs": stairs})
