"""Memory: how much a device has left, and what the caches of an engine may hold of it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from bastion_batch.engine.cache import KVCache

PROCESS_GROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


class CacheFull(Exception):
    """A cache cannot grow: its budget or the device's memory is spent. Nothing was changed."""


class MemoryBudget:
    """Bytes that some caches may hold together, the old copy of one that grows included.

    Args:
        limit_bytes: what they may hold.
        caches: who shares it; each is told of its budget.
    """

    def __init__(self, limit_bytes: int, caches: Iterable["KVCache"]) -> None:
        self.limit_bytes = limit_bytes
        self._caches = list(caches)
        for cache in self._caches:
            cache.budget = self

    @property
    def held_bytes(self) -> int:
        """What the caches hold now, spare slots included."""
        return sum(cache.allocated_bytes for cache in self._caches)

    def allows(self, num_bytes: int) -> bool:
        """Whether so much more may be held, once the caches have let go of what they can spare."""
        if self.held_bytes + num_bytes <= self.limit_bytes:
            return True
        for cache in self._caches:
            cache.trim()
        return self.held_bytes + num_bytes <= self.limit_bytes


def available_bytes(device: torch.device) -> int:
    """Memory that this process could still take on the device, without swapping.

    On CUDA what the driver has free and torch keeps unused; on a CPU what the machine has
    available, within the limits of the control groups that the process is in.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    groups = PROCESS_GROUPS.read_text(encoding="utf-8") if PROCESS_GROUPS.exists() else ""
    return min([psutil.virtual_memory().available, *cgroup_rooms(groups, CGROUP_ROOT)])


def cgroup_rooms(process_groups: str, root: Path) -> Iterator[int]:
    """Bytes left under every memory limit that binds a process.

    A file cache that can be dropped counts as left.

    Args:
        process_groups: the process's ``/proc/self/cgroup``: version 1, version 2 or both.
        root: where control groups are mounted.
    """
    for line in process_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _rooms(root, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms(root / "memory", path, *names)


def _rooms(mount: Path, path: str, limit: str, usage: str, droppable: str) -> Iterator[int]:
    """Bytes left in a group and in all groups around it; a container sees its own as the root."""
    group = mount / path.lstrip("/")
    for place in (group, *group.parents):
        if not place.is_relative_to(mount):
            return
        files = [place / name for name in (limit, usage, "memory.stat")]
        if not all(file.exists() for file in files):
            continue
        at_most, used, stat = (file.read_text(encoding="utf-8") for file in files)
        if at_most.strip() == "max":
            continue
        counts = dict(line.split() for line in stat.splitlines())
        yield max(0, int(at_most) - int(used) + int(counts.get(droppable, 0)))
