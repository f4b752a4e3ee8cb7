"""What a worker takes from the machine it is on: its share of cores and memory."""

import math
import os
from pathlib import Path
from typing import NamedTuple

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_GPUS = Path("/proc/driver/nvidia/gpus")

MEMORY_SHARE = 0.8
"""Part of a device's free memory that the caches of its workers may take together."""


class NodeShare(NamedTuple):
    """What one worker may take of its node."""

    num_threads: int
    memory_share: float
    """Of the memory that is free on its device."""

    @classmethod
    def of(cls, threads: int | str, workers_on_node: int | None, device: str) -> "NodeShare":
        """As many threads as the job says, else an equal share; a GPU is a worker's alone.

        A worker whose node nobody knew beforehand shares it with one for each other GPU.
        """
        if workers_on_node is None:
            workers_on_node = num_gpus() if device == "cuda" else 1
        if isinstance(threads, str):
            threads = max(1, usable_cores() // workers_on_node)
        sharers = workers_on_node if device == "cpu" else 1
        return cls(threads, MEMORY_SHARE / sharers)


def num_gpus(driver: Path = _GPUS) -> int:
    """GPUs of this machine, hidden ones too, or 1 where it does not say."""
    return max(1, len(list(driver.iterdir()))) if driver.is_dir() else 1


def usable_cores(cpu_limit: Path = _CPU_LIMIT) -> int:
    """Cores this process may use: by its affinity, and by its container's limit (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_limit.read_text(encoding="utf-8").split()
    except OSError:
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
