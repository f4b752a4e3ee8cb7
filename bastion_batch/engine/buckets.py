"""Numbers of tokens to which passes are padded, so that few shapes are ever computed.

A captured graph is one per shape, and on a CPU oneDNN prepares a kernel for every shape of product
with weights in its layout that it meets: in bfloat16 the first pass of a size takes 15 to 40 ms
longer, for a 135 M model, and its store of kernels holds what some 90 sizes need.
"""

from collections.abc import Callable

import torch

from bastion_batch.engine.linear import is_reordered

Bucket = Callable[[int], int]
"""From a number of tokens to that of the padded pass."""


def exact(num_tokens: int) -> int:
    """No padding."""
    return num_tokens


def coarse(num_tokens: int) -> int:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, ...: for passes whose kernels are captured one by one."""
    power = 1 << (num_tokens - 1).bit_length()
    between = power * 3 // 4
    return between if power > 16 and num_tokens <= between else power


def fine(num_tokens: int) -> int:
    """1, 2, ..., 16, 18, 20, ..., 32, 36, ...: an eighth more at most."""
    granule = max(1, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // granule) * granule


def bucket_for(device: torch.device, dtype: torch.dtype) -> Bucket:
    """What suits a whole pass."""
    return product_bucket_for(device, dtype) if device.type == "cpu" else coarse


def product_bucket_for(device: torch.device, dtype: torch.dtype) -> Bucket:
    """What suits matrix products that are never captured."""
    return fine if is_reordered(dtype, device) else exact
