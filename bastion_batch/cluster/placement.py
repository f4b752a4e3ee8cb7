"""Where workers go: one per GPU, or so many on CPUs, spread over the nodes."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from bastion_batch.config import WorkersConfig
from bastion_batch.errors import InputError


class Node(NamedTuple):
    """A machine of the cluster."""

    node_id: str
    host: str
    num_cpus: float
    num_gpus: int


class Slot(NamedTuple):
    """The place of one worker, which one incarnation after another takes."""

    worker: str
    node: Node | None
    """Preferred; None when no node has room today and one may come."""
    device: str
    workers_on_node: int
    """Workers that share the node's cores, this one included."""


def place(nodes: Sequence[Node], config: WorkersConfig) -> list[Slot]:
    """The slots of a job on these nodes.

    Raises:
        InputError: GPUs are asked for and there is none, or no node has a CPU for workers.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    if config.device == "cuda" and not num_gpus:
        raise InputError("workers.device is cuda, but the cluster has no GPU")
    if num_gpus and config.device != "cpu":
        homes = [node for node in nodes for _ in range(node.num_gpus)]
        count = num_gpus if config.count == "auto" else config.count
        return _slots([*homes, *[None] * count][:count], "cuda")
    return _slots(_spread(nodes, 1 if config.count == "auto" else config.count), "cpu")


def _spread(nodes: Sequence[Node], count: int) -> list[Node]:
    """Homes for CPU workers, each on the node with the most cores per worker then."""
    usable = [node for node in nodes if node.num_cpus]
    if not usable:
        raise InputError("no node of the cluster offers a CPU to workers")
    taken: Counter[str] = Counter()
    homes = []
    for _ in range(count):
        home = max(usable, key=lambda node: node.num_cpus / (taken[node.node_id] + 1))
        taken[home.node_id] += 1
        homes.append(home)
    return homes


def _slots(homes: Sequence[Node | None], device: str) -> list[Slot]:
    on_node = Counter(node.node_id for node in homes if node)
    return [
        Slot(f"w{i}", node, device, on_node[node.node_id] if node else 1)
        for i, node in enumerate(homes)
    ]
