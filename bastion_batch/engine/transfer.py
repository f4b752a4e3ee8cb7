"""From the host to the device without waiting for what the device is doing, and back in one wait."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device: through pinned memory, so that the host need not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[NDArray]:
    """The tensors on the host: their bytes side by side, so that the host waits for one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    return unpacked(packed(tensors).cpu(), tensors)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after the other."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpacked(data: Tensor, tensors: Sequence[Tensor]) -> list[NDArray]:
    """What `packed` made of tensors of these types and shapes, once it is on the host."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [
        part.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(data.split(sizes), tensors, strict=True)
    ]
