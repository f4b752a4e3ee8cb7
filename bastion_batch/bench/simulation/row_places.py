"""Which worker has which row of the simulated job, and who owns which unit.

    waiting at its unit's owner -> (travelling) -> queued or running at a holder -> finished

A row is in exactly one of these states, but for those that a sick worker has, which another one
may decode too. Workers are given by their place in the world.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import overload

import numpy as np

from bastion_batch.bench.simulation.worker_side import RowInfo, WorkerSide
from bastion_batch.bench.simulation.workload import Workload
from bastion_batch.bench.simulation.world import World
from bastion_batch.core.lengths import FactColumns, RowFacts
from bastion_batch.records import RowKey


class RowKeys(Sequence[RowKey]):
    """The keys of rows, made when asked for: most rows of a large job wait most of the time."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> RowKey: ...
    @overload
    def __getitem__(self, index: slice) -> "RowKeys": ...

    def __getitem__(self, index: int | slice) -> "RowKey | RowKeys":
        if isinstance(index, slice):
            return RowKeys(self._rows[index])
        return str(self._rows[index]), 0


class RowInfos(dict[int, RowInfo]):
    """The rows that somebody has or had, each worked out when it is first looked up."""

    def __init__(self, workload: Workload, unit_of: memoryview) -> None:
        super().__init__()
        self._tasks = workload.tasks_R.data
        self._prompts = workload.prompt_tokens_R.data
        self._limit = workload.config.max_new_tokens
        self._unit_of = unit_of

    def __missing__(self, row: int) -> RowInfo:
        size = self._prompts[row]
        facts = RowFacts(self._tasks[row], size, self._limit)
        info = self[row] = RowInfo(self._unit_of[row], (str(row), 0), size, facts)
        return info


class RowPlaces:
    """The rows of all open units."""

    def __init__(self, world: World) -> None:
        self._world = world
        starts = world.workload.unit_starts
        self.unit_sizes = [stop - start for start, stop in pairwise(starts)]
        unit_of = np.repeat(np.arange(len(self.unit_sizes), dtype=np.int32), self.unit_sizes)
        self.unit_of = unit_of.data
        self.workers: dict[int, WorkerSide] = {}
        """Those that live."""
        self.owners: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        """Of units that were opened and are not committed, as their helpers know them too."""
        self.infos = RowInfos(world.workload, self.unit_of)
        """Of the rows of those units that are not just waiting."""
        self.holders: dict[int, int | None] = {}
        """Who has a row that is not waiting at its owner; None while it travels."""
        self.ghosts: dict[int, int] = {}
        """Sick workers that have rows which others decode again."""

    def facts(self, rows: Sequence[int]) -> FactColumns:
        """What is known of rows."""
        columns = self._world.workload
        return FactColumns(
            columns.tasks_R[rows].astype(np.int64),
            columns.prompt_tokens_R[rows].astype(np.float64),
            np.full(len(rows), columns.config.max_new_tokens),
        )

    def owner_of(self, row: int) -> WorkerSide | None:
        """The live owner of a row's unit, if it has one."""
        owner = self.owners.get(self.unit_of[row])
        return None if owner is None else self.workers.get(owner)

    def is_waiting(self, unit: int, key: RowKey) -> bool:
        """Whether a row waits at its owner."""
        row = int(key[0])
        return row not in self.holders and not self._world.is_finished(row)

    def hold(self, row: int, holder: int | None) -> None:
        """Somebody has a row now, or it travels."""
        if row in self.holders:
            self.let_go(row)
        self.holders[row] = holder
        self._count_away(row, holder, 1)

    def let_go(self, row: int) -> int | None:
        """Nobody has a row now; who had it."""
        holder = self.holders.pop(row, None)
        self._count_away(row, holder, -1)
        return holder

    def put_back(self, row: int, num_tokens: int) -> None:
        """A row waits at its owner again, if it has one; else its next owner will find it."""
        self.let_go(row)
        owner = self.owner_of(row)
        if owner is not None:
            info = self.infos[row]
            owner.order.put_back(info.unit, info.key, info.facts, num_tokens)

    def take_out(self, worker: int, row: int) -> int | None:
        """Take a row from who has it, queued or running; its tokens, or None if it has not."""
        state = self.workers.get(worker)
        if state is None:
            return None
        if row in state.machine.rows:
            return self._world.take_out(worker, row)
        for guest in state.guests:
            if guest[0] == row:
                state.guests.remove(guest)
                return guest[1]
        return None

    def _count_away(self, row: int, holder: int | None, change: int) -> None:
        """The owner of a row knows how many of its rows each other worker has."""
        if holder is None:
            return
        owner = self.owners.get(self.unit_of[row])
        if owner is not None and owner != holder and owner in self.workers:
            self.workers[owner].away[holder + 1] += change
