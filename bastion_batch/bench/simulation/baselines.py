"""What runners do today, to compare with. They know no rates but what each is said to know.

A lost worker's rows go back to those that have not begun; a row that moves keeps its tokens.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bastion_batch.bench.simulation.world import World

MOVE_MARGIN_SECONDS = 1.3
"""What a move must save: its transfer, and a second."""


class Pull:
    """A free slot takes the next row in input order; rows may move late, by elapsed tokens alone.

    A blind move knows no lengths: when nothing is left to begin, the row with the most tokens on
    the slowest worker goes to the fastest free one, if the mean life left is shorter there.
    """

    def __init__(self, *, moves: bool = False) -> None:
        self.name = "row pull, blind migration" if moves else "row pull"
        self._moves = moves
        self._finished_tokens: list[int] = []

    def begin(self, world: World) -> None:
        """All rows wait in one queue."""
        self._world = world
        self._lengths = world.workload.lengths_R.data
        self._queue = deque(range(len(self._lengths)))
        self._guests: dict[int, deque[tuple[int, int]]] = {
            worker: deque() for worker in range(len(world.machines))
        }

    def joined(self, worker: int) -> None:
        """Fill it."""
        self._fill(worker)

    def freed(self, worker: int, finished: Sequence[int]) -> None:
        """Fill it again."""
        if self._moves:
            self._finished_tokens.extend(self._lengths[row] for row in finished)
        self._fill(worker)

    def arrived(self, worker: int, row: int, num_tokens: int) -> None:
        """Guests come first."""
        self._guests[worker].append((row, num_tokens))
        self._fill(worker)

    def tick(self, worker: int) -> None:
        """Move what is better elsewhere, as seen by worker 0's clock."""
        if self._moves and worker == 0 and not self._queue:
            self._move_some()

    def noticed(self, worker: int, seconds: float) -> None:
        """Nothing is known of notices."""

    def lost(self, worker: int, running: Sequence[int]) -> None:
        """Its rows begin again."""
        guests = [row for row, _ in self._guests[worker]]
        self._queue.extend((*running, *guests))
        self._guests[worker].clear()
        for other, present in enumerate(self._world.present):
            if present:
                self._fill(other)

    def _fill(self, worker: int) -> None:
        world, guests, queue = self._world, self._guests[worker], self._queue
        if not world.present[worker]:
            return
        free = world.machines[worker].num_free
        while free and (guests or queue):
            row, num_tokens = guests.popleft() if guests else (queue.popleft(), 0)
            world.start(worker, row, num_tokens)
            free -= 1

    def _move_some(self) -> None:
        """Each free slot takes at most one row a second."""
        world = self._world
        finished = np.sort(np.array(self._finished_tokens, dtype=np.float64))
        arriving = [0] * len(world.machines)
        for _ in range(64):
            move = self._best_move(finished, arriving)
            if move is None:
                return
            source, row, target = move
            arriving[target] += 1
            world.move(source, row, target)

    def _best_move(
        self, finished: np.ndarray, arriving: Sequence[int]
    ) -> tuple[int, int, int] | None:
        world = self._world
        machines = [
            (index, machine) for index, machine in enumerate(world.machines) if world.present[index]
        ]
        sources = [(m.worker.rate(b) / b, i) for i, m in machines if (b := len(m.rows))]
        targets = [
            (m.worker.rate(b + 1) / (b + 1), i)
            for i, m in machines
            if (b := len(m.rows) + arriving[i]) < m.worker.max_batch
        ]
        if not sources or not targets or not len(finished):
            return None
        (slow, source), (fast, target) = min(sources), max(targets)
        if source == target:
            return None
        machine = world.machines[source]
        machine.advance(world.now)
        row = max(machine.rows, key=machine.tokens_of)
        longer = finished[np.searchsorted(finished, machine.tokens_of(row)) :]
        life = (longer - machine.tokens_of(row)).mean() if len(longer) else finished.mean()
        if life / slow <= life / fast + MOVE_MARGIN_SECONDS:
            return None
        return source, row, target


class Split(Pull):
    """Every worker gets its share of the rows at the start, equal or by full rate."""

    def __init__(self, *, by_rate: bool) -> None:
        super().__init__()
        self.name = "split by throughput" if by_rate else "equal split"
        self._by_rate = by_rate

    def begin(self, world: World) -> None:
        """Rows are dealt out in input order, in stretches."""
        super().begin(world)
        self._queue.clear()
        weights = [
            (m.worker.full_rate if self._by_rate else 1.0) * world.present[i]
            for i, m in enumerate(world.machines)
        ]
        edges = np.cumsum([0.0, *weights]) / sum(weights) * len(self._lengths)
        for worker, (start, stop) in enumerate(pairwise(edges)):
            self._guests[worker].extend((row, 0) for row in range(round(start), round(stop)))


class Batches:
    """Batches of 32 rows, 16 queued at a worker and 8 of them open: each ends with its longest row.

    As an actor pool of Ray Data has it: a batch goes to the actor with the fewest in flight.
    """

    name = "batches of 32 (as Ray Data)"

    def __init__(self, batch_rows: int = 32, in_flight: int = 16, concurrent: int = 8) -> None:
        self._batch_rows = batch_rows
        self._in_flight = in_flight
        self._concurrent = concurrent

    def begin(self, world: World) -> None:
        """All batches wait."""
        self._world = world
        num_rows = len(world.workload.lengths_R)
        self._batches = deque(
            range(start, min(start + self._batch_rows, num_rows))
            for start in range(0, num_rows, self._batch_rows)
        )
        self._queued: list[deque[range]] = [deque() for _ in world.machines]
        self._open: list[list[set[int]]] = [[] for _ in world.machines]
        self._waiting: list[deque[int]] = [deque() for _ in world.machines]

    def joined(self, worker: int) -> None:
        """Deal batches, evenly by count."""
        self._deal()

    def freed(self, worker: int, finished: Sequence[int]) -> None:
        """Close the batches that are complete, and open the next ones."""
        for batch in self._open[worker]:
            batch.difference_update(finished)
        num_open = len(self._open[worker])
        self._open[worker] = [batch for batch in self._open[worker] if batch]
        self._fill(worker)
        if len(self._open[worker]) < num_open:
            self._deal()

    def arrived(self, worker: int, row: int, num_tokens: int) -> None:
        """Nothing moves."""

    def tick(self, worker: int) -> None:
        """Nothing is reported."""

    def noticed(self, worker: int, seconds: float) -> None:
        """Nothing is known of notices."""

    def lost(self, worker: int, running: Sequence[int]) -> None:
        """Its batches are done again, whole where they were not complete."""
        for batch in self._open[worker]:
            for row in batch:
                self._batches.append(range(row, row + 1))
        self._batches.extend(self._queued[worker])
        self._open[worker], self._queued[worker] = [], deque()
        self._waiting[worker].clear()
        self._deal()

    def _deal(self) -> None:
        world = self._world
        while self._batches:
            counts = [
                (len(self._queued[w]) + len(self._open[w]), w)
                for w in range(len(world.machines))
                if world.present[w]
            ]
            fewest, worker = min(counts)
            if fewest >= self._in_flight:
                return
            self._queued[worker].append(self._batches.popleft())
            self._fill(worker)

    def _fill(self, worker: int) -> None:
        world, waiting = self._world, self._waiting[worker]
        while self._queued[worker] and len(self._open[worker]) < self._concurrent:
            batch = self._queued[worker].popleft()
            self._open[worker].append(set(batch))
            waiting.extend(batch)
        free = world.machines[worker].num_free
        while free and waiting:
            world.start(worker, waiting.popleft())
            free -= 1
