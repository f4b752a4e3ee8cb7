"""Devices that are formulas: seconds of a pass from its tokens, rows and context tokens."""

import math

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.roofline import ModelShape, PassLoad, Timing
from bastion_batch.engine.latency import COARSE

LLAMA = ModelShape(
    num_layers=16,
    hidden_size=2048,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=128256,
    bytes_per_value=2,
)
"""Llama 3.2 1B."""
SPEED = DeviceSpeed(100e12, 1e12)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def ideal(
    num_tokens, num_rows, context_tokens, compute=(1.5, 2e-4), memory=(1.2, 1e-3), attention=(2, 3)
):
    """A device that obeys a roofline with these alphas, betas and gammas."""
    load = PassLoad.of(num_tokens, num_rows, context_tokens)
    tokens = float(load.num_tokens)
    flops = LLAMA.flops_per_token * tokens + LLAMA.flops_per_logit * tokens
    num_bytes = LLAMA.weight_bytes + LLAMA.bytes_per_logit * tokens
    pairs = LLAMA.flops_per_pair * float(load.attended_pairs) / SPEED.flops
    cache = LLAMA.bytes_per_cached_token * (context_tokens + tokens) / SPEED.bandwidth
    return (
        max(
            compute[0] * flops / SPEED.flops + compute[1],
            memory[0] * num_bytes / SPEED.bandwidth + memory[1],
        )
        + attention[0] * pairs
        + attention[1] * cache
    )


def flat_then_knee(num_tokens, num_rows, context_tokens):
    return 0.03 * max(1.0, num_tokens / 48) + 2e-7 * context_tokens


def steep(num_tokens, num_rows, context_tokens):
    """As float32 on a CPU: no token is free."""
    return 0.02 + 0.02 * num_tokens**0.6 + 4e-7 * context_tokens


def staircase(num_tokens, num_rows, context_tokens):
    """Tiles of 16 tokens, and of 64 beyond 64."""
    small, large = min(num_tokens, 64), max(num_tokens - 64, 0)
    return 0.02 + 0.006 * math.ceil(small / 16) + 0.012 * math.ceil(large / 64)


def reads_contexts(num_tokens, num_rows, context_tokens):
    """Attention decides: 17 ms at a context of 64, 76 ms at 1,000, and the more the more tokens."""
    per_row = num_tokens / num_rows
    return 0.012 + 6e-5 * context_tokens * (1 + per_row / 16)


def dear_rows(num_tokens, num_rows, context_tokens):
    """As a device that calls attention once per row."""
    return 0.02 + 0.002 * num_rows + 0.0004 * num_tokens


def timings(tokens=TOKENS, seconds=ideal):
    return [
        Timing(n, rows, context, seconds(n, rows, context))
        for n in tokens
        for rows, context in ((1, 128), (1, 4000), (4, 8000))
        if n >= rows
    ]


def coarse_timings(device):
    """What calibration at the start of an engine would measure."""
    points = [(p.num_tokens, p.num_rows, p.num_rows * p.context) for p in COARSE.verify]
    return [Timing(*point, device(*point)) for point in points]
