"""The device an engine runs on: which, in what dtype, and how fast."""

import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bastion_batch.core.devices import KNOWN_DEVICES, DeviceSpeed
from bastion_batch.errors import ModelError

logger = logging.getLogger(__name__)

WARM_UPS = 2
REPEATS = 3
ENOUGH_WARM_UP_SECONDS = 0.05
"""No second warm-up after so long."""
ENOUGH_SECONDS = 1.0
"""No further repeat after so long."""


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
    """The dtype of that name; ``auto``: bfloat16 where the device has units for it.

    Warns of a bfloat16 that was asked for and has none.
    """
    has_units = device.type == "cuda" or _cpu_has_bfloat16()
    if dtype == "auto":
        return torch.bfloat16 if has_units else torch.float32
    if dtype == "bfloat16" and not has_units:
        logger.warning(
            "dtype bfloat16: %s has no units for it, so float32 is faster; `auto` takes it here",
            device_name(device),
        )
    return getattr(torch, dtype)


def _cpu_has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device_name(device: torch.device) -> str:
    """What people call the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def driver_version(device: torch.device) -> str:
    """CUDA and driver versions; empty on a CPU."""
    if device.type != "cuda":
        return ""
    driver = Path("/proc/driver/nvidia/version")
    first_line = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else ""
    return f"CUDA {torch.version.cuda}; {first_line}"


def cpu_capabilities() -> str:
    """The vector and matrix units that torch uses or could use, in order."""
    wide = [flag for flag in _cpu_info("flags").split() if flag.startswith(("avx", "amx"))]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *sorted(wide)])


def device_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Peak FLOP/s and bandwidth: from the table of known devices, or measured."""
    if device.type == "cuda" and dtype.itemsize == 2:
        known = KNOWN_DEVICES.get(device_name(device))
        if known is not None:
            return known
    return _measured_speed(device, dtype)


def _measured_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """A matrix product and a copy, timed."""
    on_cuda = device.type == "cuda"
    size, num_bytes = (4096, 256 << 20) if on_cuda else (1024, 64 << 20)
    a = torch.randn(size, size, device=device).to(dtype)
    large = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    product_seconds = median_seconds(lambda: a @ a, device)
    copy_seconds = median_seconds(lambda: copy.copy_(large), device)
    source = f"measured: a product of {size} x {size} in {a.dtype}, a copy of {num_bytes >> 20} MiB"
    return DeviceSpeed(2 * size**3 / product_seconds, 2 * num_bytes / copy_seconds, source)


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of some calls after a warm-up, the device's own work included.

    On a slow or busy device there are fewer of both, but always one of each.
    """
    start = time.perf_counter()
    for _ in range(WARM_UPS):
        _timed(work, device)
        if time.perf_counter() - start > ENOUGH_WARM_UP_SECONDS:
            break
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(_timed(work, device))
    return float(np.median(seconds))


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(field: str) -> str:
    """A field of Linux's description of the first processor; empty where there is none."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return ""
