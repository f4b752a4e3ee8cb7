"""What a worker takes from the machine it is on: its share of the cores, and a place for its log."""

import logging
import math
import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def worker_threads(threads: int | str, workers_on_node: int) -> int:
    """CPU threads of one worker: as the job says, or its share of the cores it may use."""
    if isinstance(threads, int):
        return threads
    return max(1, usable_cores() // workers_on_node)


def usable_cores(cpu_limit: Path = _CPU_LIMIT) -> int:
    """Cores this process may use: by its affinity, and by its container's limit (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_limit.read_text(encoding="utf-8").split()
    except OSError:
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))


def log_to_file(output: Path, worker: str) -> None:
    """Send this package's log to `_bastion/logs/<worker>.log`, once per process."""
    path = output / "_bastion" / "logs" / f"{worker}.log"
    package = logging.getLogger("bastion_batch")
    if any(getattr(h, "baseFilename", None) == str(path) for h in package.handlers):
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
