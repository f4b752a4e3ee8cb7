"""Sizes read off the latency model: rows of a batch, prompt tokens of a pass, bytes of a pass."""

from typing import NamedTuple

import numpy as np

from bastion_batch.core.roofline import ModelShape
from bastion_batch.engine.cache import capacity_for
from bastion_batch.engine.costs import StepCosts

TYPICAL_CONTEXT = 512
"""Cached tokens of a row when batch sizes are compared."""

MAX_ROWS = 1024
MIN_GAIN = 1.15
"""Tokens per second that twice the rows must give over once the rows, to be worth their memory."""

PASS_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Pass tokens among which the knee is looked for."""
KNEE_EXCESS = 1.25
"""At the knee a token costs at most this times what it costs in the cheapest pass."""

MIN_CHUNK = 32
"""Prompt tokens that may enter a pass however full it is, so that prompts always get on."""
ALONE_CHUNK = 512
"""Prompt tokens that enter a pass in which nothing is decoded."""


class Bounds(NamedTuple):
    """What an engine may have at once."""

    max_rows: int
    """Live rows."""
    cache_bytes: int
    """In the caches of target and drafter."""


def choose_bounds(
    memory_bytes: int,
    wanted_rows: int | None,
    costs: StepCosts,
    *,
    nodes_in_all: int,
    nodes_per_row: int,
    bytes_per_token: int,
    bytes_per_row: int,
) -> Bounds:
    """How memory is shared between the caches and the largest pass, and for how many rows.

    Args:
        memory_bytes: what there is for both.
        wanted_rows: most live rows; None: as many as pay, and fit at a typical context.
        costs: the engine's latency models.
        nodes_in_all: most drafted nodes of a pass,
        nodes_per_row: or so many for each row, if that is more.
        bytes_per_token: of one token in all caches.
        bytes_per_row: of a live row beside the caches.

    Raises:
        ValueError: the memory does not hold the largest pass.
    """

    def largest_pass(num_rows: int) -> int:
        num_nodes = max(nodes_in_all, num_rows * nodes_per_row)
        return pass_bytes(costs.verify.shape, num_rows + num_nodes) + num_rows * bytes_per_row

    rows = paying_rows(costs) if wanted_rows is None else wanted_rows
    row_bytes = bytes_per_token * capacity_for(TYPICAL_CONTEXT)
    while (
        wanted_rows is None and rows > 1 and memory_bytes < (largest_pass(rows) + rows * row_bytes)
    ):
        rows //= 2
    cache_bytes = memory_bytes - largest_pass(rows)
    if cache_bytes <= 0:
        raise ValueError(
            f"memory of {memory_bytes} bytes does not hold the largest pass, of {rows} rows: "
            f"{largest_pass(rows)} bytes"
        )
    return Bounds(rows, cache_bytes)


def paying_rows(costs: StepCosts) -> int:
    """Rows up to which plain decoding gets clearly faster in tokens per second.

    Sizes are tried by doubling, at a typical context. Rows beyond the last doubling that pays
    would hold memory and delay every row for next to nothing. Drafting raises the rate of small
    batches most, so that it gives no reason for a larger one.
    """
    num_rows = 1
    while num_rows < MAX_ROWS:
        gain = _plain_rate(costs, 2 * num_rows) / _plain_rate(costs, num_rows)
        if gain < MIN_GAIN:
            break
        num_rows *= 2
    return num_rows


def _plain_rate(costs: StepCosts, num_rows: int) -> float:
    context = num_rows * TYPICAL_CONTEXT
    seconds = costs.verify.seconds(num_rows, num_rows, context) + costs.other_seconds
    return num_rows / seconds


def knee_tokens(costs: StepCosts, num_rows: int, context_tokens: int) -> int:
    """Tokens of the smallest pass in which a token costs about what it does in a large one.

    Below the knee a pass mostly waits for the weights, and tokens are nearly free; beyond it every
    token takes its full time, and a longer pass only delays the rows that decode in it.

    Args:
        costs: the engine's latency models.
        num_rows: rows in the pass.
        context_tokens: cached tokens, summed over the rows.
    """
    sizes = np.array(PASS_SIZES, np.float64)
    per_token = costs.verify.seconds(sizes, num_rows, context_tokens) / sizes
    near = np.flatnonzero(per_token <= KNEE_EXCESS * per_token.min())
    return PASS_SIZES[int(near[0])]


def prompt_room(
    costs: StepCosts, num_decoding: int, num_prefilling: int, context_tokens: int
) -> int:
    """Prompt tokens for the coming pass: up to the knee beside rows that decode, more alone.

    Args:
        costs: the engine's latency models.
        num_decoding: rows that decode in the pass.
        num_prefilling: rows with prompt tokens left.
        context_tokens: cached tokens of all of them.
    """
    if not num_decoding:
        return ALONE_CHUNK
    knee = knee_tokens(costs, num_decoding + num_prefilling, context_tokens)
    return max(MIN_CHUNK, knee - num_decoding)


def pass_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Memory of a pass beside the caches: logits of every token, and the widest activations.

    Logits are counted twice, in the model's dtype and in float32, in which tokens are chosen.
    """
    logits = num_tokens * shape.vocab_size * (shape.bytes_per_value + 4)
    widest = 2 * shape.ffn_size + 8 * shape.hidden_size
    activations = max(num_tokens, ALONE_CHUNK) * widest * shape.bytes_per_value
    return logits + activations
