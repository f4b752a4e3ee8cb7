"""The device an engine runs on: which, in what dtype, and how fast."""

import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bastion_batch.core.devices import KNOWN_DEVICES, DeviceSpeed
from bastion_batch.errors import ModelError

WARM_UPS = 2
REPEATS = 3


def pick_device(device: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA if there is one.

    Raises:
        ModelError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelError("device cuda was asked for, and torch finds no CUDA device")
    return torch.device("cuda" if device in ("auto", "cuda") and has_cuda else "cpu")


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; ``auto``: bfloat16 where the device has units for it."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        return torch.bfloat16
    has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_units else torch.float32


def default_max_batch(device: torch.device) -> int:
    """Live rows of one engine when nothing else is said."""
    return 64 if device.type == "cuda" else 16


def device_name(device: torch.device) -> str:
    """What people call the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def device_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Peak FLOP/s and bandwidth: from the table of known devices, or measured."""
    name = device_name(device)
    if device.type == "cuda" and dtype.itemsize == 2:
        for known, speed in KNOWN_DEVICES.items():
            if known in name:
                return speed
    return _measured_speed(device, dtype)


def _measured_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """A matrix product and a copy, timed."""
    size = 1024
    a = torch.randn(size, size, device=device).to(dtype)
    large = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    product_seconds = median_seconds(lambda: a @ a, device)
    copy_seconds = median_seconds(lambda: copy.copy_(large), device)
    return DeviceSpeed(2 * size**3 / product_seconds, 2 * large.numel() / copy_seconds)


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of some calls after a warm-up, the device's own work included."""
    for _ in range(WARM_UPS):
        work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
