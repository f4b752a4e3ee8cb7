"""What a job's pools would be on the cluster that is there now. Starts nothing."""

import sys
from collections import Counter
from collections.abc import Sequence

from bastion_batch.cluster.connect import cluster_address, connected
from bastion_batch.cluster.placement import Placement, Slot
from bastion_batch.cluster.pools import Node, Pool, pools_of
from bastion_batch.config import WorkersConfig


def describe_pools(workers: WorkersConfig, nodes: Sequence[Node] | None) -> list[str]:
    """A line for each pool: what it selects, and which of these nodes that is.

    Raises:
        JobFileError: an accelerator has no known name.
    """
    pools = pools_of(workers)
    if nodes is None:
        return [f"{_offer(pool)}: no cluster runs here" for pool in pools]
    placement = Placement(pools)
    placement.look(nodes)
    lines = []
    for pool in pools:
        slots = [slot for slot in placement.slots.values() if slot.pool is pool]
        lines.append(f"{_offer(pool)}: {_places(slots)}")
    if placement.without_place():
        lines.append(f"there are: {', '.join(map(str, nodes))}")
    return lines


def cluster_nodes_now() -> list[Node] | None:
    """The nodes of the cluster that a job would join, or None where it would start a Ray.

    Raises:
        InputError: the cluster that is named cannot be used.
    """
    initialized = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if not initialized and cluster_address() is None:
        return None
    with connected(1, "bastion-batch-plan"):
        from bastion_batch.cluster.fleet import cluster_nodes

        return cluster_nodes()


def _offer(pool: Pool) -> str:
    price = pool.config.price_per_hour
    return pool.describe() + ("" if price is None else f", ${price:.2f} an hour each")


def _places(slots: Sequence[Slot]) -> str:
    homes = Counter((slot.node.host, slot.node.accelerators) for slot in slots if slot.node)
    parts = [
        f"{count} on {host}{f' ({kinds[0]})' if kinds else ''}"
        for (host, kinds), count in homes.items()
    ]
    waiting = len(slots) - sum(homes.values())
    if waiting or not slots:
        parts.append(f"{waiting} without a machine now" if slots else "no machine now")
    return ", ".join(parts)
