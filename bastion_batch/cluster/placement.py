"""Where workers go: places for each pool on the nodes that it selects, as nodes come and go.

A worker's slot is its place, which one incarnation after another takes. Pools of a fixed size have
all their slots from the start; those without a node wait in Ray, which is how an autoscaler learns
what is wanted. A pool that follows the machines (`count: auto`) has one slot for each GPU that it
selects, or one for each machine where none has a GPU, and gets more when machines appear.

A slot whose node is gone is homeless: its next worker goes where Ray has room, and the slot's home
is then there. While a pool has homeless slots it gets no new ones, so that a machine that replaces
another is not counted twice.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from bastion_batch.cluster.pools import Node, Pool


class Slot(NamedTuple):
    """The place of one worker, which one incarnation after another takes."""

    worker: str
    pool: Pool
    node: Node | None
    """Its home; None when no node has room today and one may come."""
    device: str
    workers_on_node: int | None
    """Workers that share the node's cores, this one included; None until it has had a node."""


class Placement:
    """The slots of one invocation. Pure: it is told which nodes there are.

    Args:
        pools: in the order in which they take their places.
        may_grow: whether nodes may appear because they are asked for. Then a pool that follows
            the machines asks for one worker where it selects none.
    """

    def __init__(self, pools: Sequence[Pool], *, may_grow: bool = False) -> None:
        self._pools = tuple(pools)
        self._may_grow = may_grow
        self._slots: dict[str, Slot] = {}
        self._given_up: set[str] = set()
        self._begun: set[str] = set()
        self._nodes: Sequence[Node] = ()

    @property
    def slots(self) -> Mapping[str, Slot]:
        """All slots so far, by worker."""
        return self._slots

    @property
    def has_home(self) -> bool:
        """Whether any slot has a node."""
        return any(slot.node for slot in self._slots.values())

    def look(self, nodes: Sequence[Node], avoid: Collection[str] = ()) -> list[Slot]:
        """See which nodes there are, without those to avoid; the slots that are new."""
        self._nodes = [n for n in nodes if n.num_cpus and n.node_id not in avoid]
        before = len(self._slots)
        for pool in self._pools:
            device = pool.device(self._selected(pool))
            if device is None:
                continue
            for home in self._new_homes(pool, device):
                worker = f"w{len(self._slots)}"
                self._slots[worker] = Slot(worker, pool, home, device, None)
        new = list(self._slots)[before:]
        for worker in new:
            self._slots[worker] = self._sharing(self._slots[worker])
        return [self._slots[worker] for worker in new]

    def lose_home(self, worker: str) -> Slot:
        """The node of this slot is gone, or is not to be used; its slot now.

        Its next worker is to share a node with as many as before: `settle` knows better too late.
        """
        slot = self._slots[worker] = self._slots[worker]._replace(node=None)
        return slot

    def settle(self, worker: str, node_id: str) -> None:
        """Ray has put this worker on that node."""
        node = next((n for n in self._nodes if n.node_id == node_id), None)
        if node is not None and self._slots[worker].node is None:
            self._slots[worker] = self._slots[worker]._replace(node=node)
            self._slots[worker] = self._sharing(self._slots[worker])

    def give_up(self, worker: str) -> None:
        """This slot's workers are not started again; its place stays taken."""
        self._given_up.add(worker)

    def selector(self, slot: Slot) -> dict[str, str] | None:
        """Where Ray may put the worker of a homeless slot; None if nowhere today."""
        nodes = self._open_nodes(slot)
        if not nodes and not slot.pool.may_wait:
            return None
        return slot.pool.label_selector(nodes)

    def closed_to(self, slot: Slot) -> frozenset[str]:
        """Nodes that have their one worker of this homeless slot's pool."""
        is_one_each = slot.pool.config.count == "auto" and slot.device == "cpu"
        return frozenset(self._own(slot.pool)) if is_one_each else frozenset()

    @property
    def may_go_on(self) -> bool:
        """Whether a worker that is not given up has a node, or may come by one."""
        return self._may_grow or any(
            slot.node is not None or self._open_nodes(slot) for _, slot in self._live_slots()
        )

    def undecided(self) -> list[Pool]:
        """Pools of a fixed size without workers: only a machine will tell their device."""
        return [
            pool
            for pool in self._pools
            if pool.config.count != "auto" and pool.device(self._selected(pool)) is None
        ]

    def without_place(self) -> list[Pool]:
        """Pools none of whose workers has a node."""
        settled = {slot.pool.name for slot in self._slots.values() if slot.node}
        return [pool for pool in self._pools if pool.name not in settled]

    def _open_nodes(self, slot: Slot) -> list[Node]:
        """Nodes of today where a homeless slot's worker may go."""
        closed = self.closed_to(slot)
        return [node for node in self._selected(slot.pool) if node.node_id not in closed]

    def _selected(self, pool: Pool) -> list[Node]:
        return [node for node in self._nodes if pool.selects(node)]

    def _new_homes(self, pool: Pool, device: str) -> list[Node | None]:
        """Homes of the slots that a pool is to get now, for workers on such a device."""
        nodes = self._selected(pool)
        count = pool.config.count
        first = pool.name not in self._begun
        self._begun.add(pool.name)
        if count != "auto" and not first:
            return []
        if device == "cuda":
            homes: list[Node | None] = list(self._free_gpus(pool, nodes))
        else:
            homes = list(self._cpu_homes(pool, nodes, count))
        if count != "auto":
            return [*homes, *[None] * count][:count]
        if any(s.pool is pool and not s.node for w, s in self._live_slots()):
            return []
        return homes or ([None] if first and self._may_grow and pool.may_wait else [])

    def _live_slots(self) -> list[tuple[str, Slot]]:
        return [(w, s) for w, s in self._slots.items() if w not in self._given_up]

    def _free_gpus(self, pool: Pool, nodes: Sequence[Node]) -> list[Node]:
        """Nodes, each once for every GPU that no slot has, as far as the pool's resources go."""
        gpus = Counter(
            s.node.node_id for s in self._slots.values() if s.node and s.device == "cuda"
        )
        own = self._own(pool)
        return [
            node
            for node in nodes
            for _ in range(
                min(
                    node.num_gpus - gpus[node.node_id],
                    pool.places(node) - own[node.node_id],
                )
            )
        ]

    def _cpu_homes(self, pool: Pool, nodes: Sequence[Node], count: int | str) -> list[Node]:
        """One for each node, or so many, each on the node with the most cores per worker then."""
        own = self._own(pool)
        if isinstance(count, str):
            return [node for node in nodes if not own[node.node_id] and pool.places(node)]
        taken = self._homed()
        homes: list[Node] = []
        for _ in range(count):
            roomy = [node for node in nodes if own[node.node_id] < pool.places(node)]
            if not roomy:
                break
            home = max(roomy, key=lambda node: node.num_cpus / (taken[node.node_id] + 1))
            taken[home.node_id] += 1
            own[home.node_id] += 1
            homes.append(home)
        return homes

    def _own(self, pool: Pool) -> Counter[str]:
        return Counter(s.node.node_id for s in self._slots.values() if s.node and s.pool is pool)

    def _homed(self) -> Counter[str]:
        return Counter(slot.node.node_id for slot in self._slots.values() if slot.node)

    def _sharing(self, slot: Slot) -> Slot:
        on_node = self._homed()[slot.node.node_id] if slot.node else None
        return slot._replace(workers_on_node=on_node)
