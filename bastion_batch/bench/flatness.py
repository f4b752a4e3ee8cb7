"""How much longer a step takes late in a long output than early, and what reading the KV explains.

Reading the KV that a longer context adds takes more than its bytes over the bandwidth: it waits in
the midst of a pass, and pushes weights out of the cache that would have been found there. So it is
measured where it happens: a third arm decodes at the early position, and with every layer reads as
much memory as the late one has more keys and values. A fourth reads a fraction of it by as many
calls: what they differ by is the reading alone.

Shape letters: S tokens, E hidden size, H all heads, D head size, L layers, W words of memory.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bastion_batch.bench.blocks import Arm, LiveRows, alternate
from bastion_batch.bench.ratios import estimate
from bastion_batch.bench.setup import Bench
from bastion_batch.engine.device import device_speed
from bastion_batch.engine.transformer import DecoderStack, Layer
from bastion_batch.records import SamplingParams

EARLY, LATE, WINDOW = 100, 1500, 50
"""Output positions whose step times are compared, each with so many on either side of it."""
BLOCK_STEPS = 10
FRACTION = 8
"""What the fourth arm reads is smaller by this."""
ALLOWANCE = 1.25
"""Of the time to read the KV that a longer context adds."""

Progress = Callable[[str], None]


class ReadingStack(DecoderStack):
    """A stack that reads other memory, too, before the attention of every layer.

    Args:
        stack: the layers.
        memory_LW: what is read with each layer.
    """

    def __init__(self, stack: DecoderStack, memory_LW: Tensor) -> None:
        super().__init__(stack.config, stack.layers, stack.final_norm, stack.rotary)
        self._memory_of = dict(zip(map(id, stack.layers), memory_LW, strict=True))

    def project(self, layer: Layer, normed_SE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the layer's attention needs, `[S, H, D]`, its share of the memory read."""
        heads_SHD = super().project(layer, normed_SE, cos, sin)
        self._memory_of[id(layer)].amax()
        return heads_SHD


def measure_flatness(
    bench: Bench,
    batch_size: int,
    progress: Progress,
    *,
    early: int = EARLY,
    late: int = LATE,
    window: int = WINDOW,
) -> dict[str, Any]:
    """Step time late in a long output against early, and what the added KV explains; JSON-able.

    The arms take turns, so that a machine that slows down slows all of them.
    """
    cache = bench.target.new_cache()
    num_added = (late - early) * batch_size
    added_LW = cache.new_entries(num_added).fill_(1).flatten(1).view(torch.int32)
    reading = _reading(bench, added_LW)
    reading_little = _reading(bench, added_LW[:, : added_LW.shape[1] // FRACTION])
    arms = [
        _around("early", bench, batch_size, early, window),
        _around("reading", reading, batch_size, early, window),
        _around("reading little", reading_little, batch_size, early, window),
        _around("late", bench, batch_size, late, window),
    ]
    groups = alternate(
        arms, seconds=bench.config.seconds, block_steps=BLOCK_STEPS, progress=progress
    )
    early_G, reading_G, little_G, late_G = (
        np.array([group[arm].seconds / group[arm].num_steps for group in groups])
        for arm in range(len(arms))
    )
    added = estimate(late_G - early_G)
    read = estimate((reading_G - little_G) * FRACTION / (FRACTION - 1))
    bandwidth = device_speed(bench.target.device, bench.target.dtype).bandwidth
    added_bytes = num_added * cache.bytes_per_token
    return {
        "batch": batch_size,
        "flatness": {
            "num_groups": len(groups),
            "early_step_seconds": round(float(np.median(early_G)), 6),
            "late_step_seconds": round(float(np.median(late_G)), 6),
            "added_seconds": round(added.median, 6),
            "added_seconds_interval": [round(added.low, 6), round(added.high, 6)],
            "added_kv_bytes": added_bytes,
            "read_seconds": round(read.median, 6),
            "read_seconds_interval": [round(read.low, 6), round(read.high, 6)],
            "allowed_added_seconds": round(ALLOWANCE * read.median, 6),
            "holds": bool(added.median <= ALLOWANCE * read.median),
            "bandwidth_bytes_per_second": round(bandwidth),
            "seconds_at_full_bandwidth": round(added_bytes / bandwidth, 6),
        },
    }


def _reading(bench: Bench, memory_LW: Tensor) -> Bench:
    """The same models; the target's passes read this memory as well."""
    target = copy(bench.target)
    target.stack = ReadingStack(target.stack, memory_LW)
    return replace(bench, target=target)


def _around(name: str, bench: Bench, batch_size: int, position: int, window: int) -> Arm:
    """Plain decoding of rows from `window` output tokens before a position to as many after it."""
    engine = bench.engine(batch_size, None, "ar")
    sampling = SamplingParams(max_new_tokens=position + window, ignore_eos=True)
    rows = LiveRows(engine, bench.prompts, sampling, num_made_up=position - window)
    return Arm(name, rows, "ar")
