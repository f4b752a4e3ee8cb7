"""Sizes read off made-up latency models, whose knees and plateaus are known."""

import pytest
from tiny import tiny_target

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.sizing import (
    ALONE_CHUNK,
    MIN_CHUNK,
    choose_bounds,
    knee_tokens,
    pass_bytes,
    paying_rows,
    prompt_room,
)

QWEN3_8B = ModelShape(
    num_layers=36, hidden_size=4096, num_q_heads=32, num_kv_heads=8, head_dim=128,
    ffn_size=12288, vocab_size=151936, bytes_per_value=2,
)  # fmt: skip


def costs_of(flops: float, bandwidth: float, shape: ModelShape = QWEN3_8B) -> StepCosts:
    """A device that does exactly what its data sheet says."""
    speed = DeviceSpeed(flops, bandwidth, "made up")
    return StepCosts(LatencyModel(shape, speed), None)


GPU = (800e12, 4e12)
"""200 operations in the time of one byte: its knee is near 200 tokens of two bytes a weight."""
SLOW = (1e11, 1e12)
"""Computes so slowly that a token costs the same in every pass."""


def test_the_knee_is_where_the_weights_no_longer_decide():
    assert 128 <= knee_tokens(costs_of(*GPU), 1, 512) <= 256
    assert knee_tokens(costs_of(*SLOW), 1, 512) == 16
    faster = knee_tokens(costs_of(2 * GPU[0], GPU[1]), 1, 512)
    assert faster > knee_tokens(costs_of(*GPU), 1, 512)


def test_prompts_fill_a_pass_up_to_the_knee():
    costs = costs_of(*GPU)
    knee = knee_tokens(costs, 9, 9 * 512)
    assert prompt_room(costs, 8, 1, 9 * 512) == knee - 8
    assert prompt_room(costs, 400, 1, 9 * 512) == MIN_CHUNK, "prompts always get on"
    assert prompt_room(costs, 0, 4, 0) == ALONE_CHUNK
    assert prompt_room(costs_of(*SLOW), 8, 1, 9 * 512) == MIN_CHUNK


def test_rows_pay_until_the_rate_is_flat():
    """A device that only reads weights gains from every row; one that only computes from none."""
    assert paying_rows(costs_of(1e18, 4e12)) >= 64
    assert paying_rows(costs_of(*SLOW)) == 1
    few, many = paying_rows(costs_of(*GPU)), paying_rows(costs_of(4 * GPU[0], GPU[1]))
    assert 16 <= few <= many <= 1024


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    costs = costs_of(*GPU)
    sizes = {"nodes_in_all": 512, "nodes_per_row": 15, "bytes_per_token": 150_000}
    sizes["bytes_per_row"] = 1_000
    ample = choose_bounds(1 << 42, None, costs, **sizes)
    assert ample.max_rows == paying_rows(costs)
    tight = choose_bounds(4 << 30, None, costs, **sizes)
    assert 1 <= tight.max_rows < ample.max_rows
    assert tight.max_rows * 512 * 150_000 <= tight.cache_bytes < 4 << 30
    wanted = choose_bounds(4 << 30, 100, costs, **sizes)
    assert wanted.max_rows == 100, "what was asked for stands; rows wait when it is too much"


def test_a_pass_leaves_room_for_the_logits_of_all_its_tokens():
    costs = costs_of(*GPU)
    sizes = {"nodes_in_all": 512, "nodes_per_row": 15, "bytes_per_token": 150_000}
    bounds = choose_bounds(1 << 40, 8, costs, **sizes, bytes_per_row=0)
    more = choose_bounds(1 << 40, 8, costs, **sizes, bytes_per_row=1000)
    assert bounds.cache_bytes - more.cache_bytes == 8 * 1000
    logits = (8 + 512) * QWEN3_8B.vocab_size * (2 + 4)
    assert (1 << 40) - bounds.cache_bytes >= logits
    assert pass_bytes(QWEN3_8B, 520) == (1 << 40) - bounds.cache_bytes
    with pytest.raises(ValueError, match="memory of 1024 bytes does not hold the largest pass"):
        choose_bounds(1024, 1, costs, **sizes, bytes_per_row=0)


def test_a_tiny_model_is_sized_too():
    shape = tiny_target("llama").shape
    assert paying_rows(costs_of(1e11, 1e10, shape)) >= 1
    assert knee_tokens(costs_of(1e11, 1e10, shape), 1, 0) >= 16
