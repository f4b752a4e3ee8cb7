"""Our policy in the simulator: the product's coordinator, and workers that do as they are told.

What a worker of the product does, without its rows: it opens the units that it is leased, starts
rows in the order of its own `RowOrder`, reports once a second, moves and shares rows as its orders
say. Every decision is the product's: `cluster.coordinator`, `core.balance`, `core.row_order`,
`core.lengths`.
"""

from collections.abc import Sequence

import numpy as np

from bastion_batch.bench.simulation.row_places import RowKeys, RowPlaces
from bastion_batch.bench.simulation.worker_side import Opened, WorkerSide
from bastion_batch.bench.simulation.world import World
from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.messages import Lease, UnitSummary, Wait
from bastion_batch.core.orders import RowMove, Share

MESSAGE_SECONDS = 0.1
"""From one worker to another, with the turns that they take to read it."""
OPEN_SECONDS = 0.02
"""What opening the next unit of a span holds up the engine."""
SPAN_SECONDS = 0.2
"""The same when the span was not open."""
DETECT_SECONDS = 5.0
"""From a worker's end until the coordinator is told."""
JOURNAL_SECONDS = 30.0
"""Finished rows are safe after this long at most."""
LEAVE_SECONDS = 3.0
"""A worker that was given notice journals what it still has so long before its end."""
CLOCK_ERROR = 0.02
"""Of a worker's clock, between two reports."""


class Ours:
    """The product's policy; without migration, orders to move running rows are not followed."""

    def __init__(self, *, moves: bool = True) -> None:
        self.name = "ours" if moves else "ours, no migration"
        self.num_calls = 0
        """To the coordinator."""
        self._moves = moves

    def begin(self, world: World) -> None:
        """Nothing is known yet."""
        workload = world.workload
        self._world = world
        self._workload = workload
        self._places = RowPlaces(world)
        self._workers = self._places.workers
        self._lengths = workload.lengths_R.data
        self.coordinator = Coordinator(
            spans=workload.unit_spans, num_outputs=self._places.unit_sizes
        )
        self._noise = np.random.default_rng(workload.config.seed)

    # What happens to a worker

    def joined(self, worker: int) -> None:
        """Register, lease, begin."""
        machine = self._world.machines[worker]
        self._workers[worker] = WorkerSide(
            worker + 1,
            machine,
            self._places.infos,
            self._places.epochs,
            journaled_at=self._world.now,
        )
        info = {"device": machine.worker.device, "max_batch": machine.worker.max_batch}
        self.num_calls += 1
        self.coordinator.register(machine.worker.name, worker + 1, info, self._world.now)
        self._open_and_fill(worker)

    def freed(self, worker: int, finished: Sequence[int]) -> None:
        """Outcomes go to their owners, slots to the next rows."""
        state = self._workers[worker]
        for row in finished:
            state.ended(row, self._lengths[row])
            self._settle(worker, row)
        self._open_and_fill(worker)

    def arrived(self, worker: int, row: int, num_tokens: int) -> None:
        """A guest, or a row of its own that came back."""
        state = self._workers.get(worker)
        if self._world.is_finished(row):
            return
        if state is None or state.leaves_at is not None:
            self._places.put_back(row, num_tokens)
            return
        self._places.hold(row, worker)
        state.guests.append((row, num_tokens))
        self._fill(worker)

    def tick(self, worker: int) -> None:
        """Report, and do what the answer says."""
        state, world = self._workers.get(worker), self._world
        if state is None or world.machines[worker].speed == 0:
            return
        now = world.now
        state.machine.advance(now)
        if now - state.journaled_at >= JOURNAL_SECONDS:
            state.unsafe.clear()
            state.journaled_at = now
        report = state.report(now, 1 + float(self._noise.normal(0.0, CLOCK_ERROR)))
        self.num_calls += 1
        directions = self.coordinator.report(state.attempt, report, now)
        state.orders = directions.orders
        if state.orders.model is not None:
            state.model = state.orders.model
            state.order.learn(state.model)
        state.order.finish_oldest(state.orders.oldest_first)
        for attempt in directions.lost:
            self._decode_again(worker, attempt - 1)
        for move in state.orders.moves if self._moves else ():
            self._follow_move(worker, move)
        for share in state.orders.shares:
            self._follow_share(state, share)
        self._open_and_fill(worker)
        self._leave_when_due(worker)

    def noticed(self, worker: int, seconds: float) -> None:
        """It is to give everything away in time."""
        state = self._workers[worker]
        state.leaves_at = self._world.now + seconds
        self.coordinator.dismiss(state.attempt)

    def lost(self, worker: int, running: Sequence[int]) -> None:
        """What only it had is gone; the coordinator learns of it a little later."""
        state = self._workers.pop(worker)
        for row in state.unsafe:
            if self._places.unit_of[row] in state.open:
                self._world.unfinish(row, self._lengths[row])
        gone = {*running, *(row for row, _ in state.guests)}
        self._world.later(DETECT_SECONDS, lambda: self._forget(worker, state, gone))

    def _forget(self, worker: int, state: WorkerSide, gone: set[int]) -> None:
        """The coordinator is told: rows wait at their owners again, units for new ones."""
        for unit in state.open:
            del self._places.owners[unit]
        for row in gone:
            if self._places.holders.get(row) == worker:
                self._places.put_back(row, 0)
        self.coordinator.worker_lost(state.attempt, (), self._world.now)

    # Units

    def _open_and_fill(self, worker: int) -> None:
        """Open units while that is wanted, then fill the engine."""
        state, now = self._workers[worker], self._world.now
        while state.orders.may_open and state.leaves_at is None and now >= state.ask_again_at:
            self.num_calls += 1
            match self.coordinator.lease(state.attempt, now):
                case Lease() as lease:
                    self._open_unit(worker, state, lease)
                case Wait() as wait:
                    state.ask_again_at = now + wait.seconds
                case _:
                    break
        self._fill(worker)

    def _open_unit(self, worker: int, state: WorkerSide, lease: Lease) -> None:
        """Read a unit; its rows wait, but for those that have ended or that somebody has."""
        world, columns, unit = self._world, self._workload, lease.unit
        span = columns.unit_spans[unit]
        state.machine.advance(world.now)
        state.machine.stall(OPEN_SECONDS if span == state.span else SPAN_SECONDS)
        state.span = span
        if unit in self._places.owners:
            self._dispossess(unit)
        rows = columns.rows(unit)
        left = rows if lease.epoch == 1 else [row for row in rows if not world.is_finished(row)]
        state.open[unit] = Opened(lease.epoch, len(rows), len(left))
        self._places.owners[unit], self._places.epochs[unit] = worker, lease.epoch
        waiting = left if lease.epoch == 1 else self._find_waiting(worker, state, left)
        state.order.add(unit, RowKeys(waiting), self._places.facts(waiting))
        if not left:
            self._commit(worker, state, unit)

    def _find_waiting(self, worker: int, state: WorkerSide, rows: Sequence[int]) -> list[int]:
        """Those of a unit's rows that nobody has; the others are away."""
        holders = self._places.holders
        for row in rows:
            holder = holders.get(row)
            if holder is not None and holder != worker:
                state.away[holder + 1] += 1
        return [row for row in rows if row not in holders]

    def _dispossess(self, unit: int) -> None:
        """A sick owner loses a unit; what it has of it, others decode again."""
        former = self._places.owners.pop(unit)
        state = self._workers[former]
        del state.open[unit]
        state.order.drop_unit(unit)
        for row in self._workload.rows(unit):
            holder = self._places.holders.get(row)
            if holder == former:
                self._places.ghosts[row] = former
                del self._places.holders[row]
            elif holder is not None:
                state.away[holder + 1] -= 1

    def _commit(self, worker: int, state: WorkerSide, unit: int) -> None:
        opened = state.open.pop(unit)
        del self._places.owners[unit], self._places.epochs[unit]
        state.order.drop_unit(unit)
        self.num_calls += 1
        summary = UnitSummary(opened.num_rows, 0, won=True)
        self.coordinator.committed(state.attempt, unit, opened.epoch, summary, self._world.now)

    # Rows

    def _fill(self, worker: int) -> None:
        """Guests first, then the rows that the order names."""
        state, world = self._workers[worker], self._world
        free = state.machine.num_free
        while free and state.guests:
            world.start(worker, *state.guests.popleft())
            free -= 1
        limit = state.orders.max_running
        if limit is not None:
            free = min(free, limit - len(state.machine.rows) - len(state.guests))
        while free > 0:
            row = state.order.next(self._places.is_waiting)
            if row is None:
                return
            number = int(row.key[0])
            self._places.holders[number] = worker
            world.start(worker, number, row.num_tokens)
            free -= 1

    def _settle(self, worker: int, row: int) -> None:
        """A row has ended at a worker: its owner has one less to wait for."""
        places = self._places
        unit = places.unit_of[row]
        owner = places.owners.get(unit)
        if places.holders.get(row) == owner == worker and row not in places.ghosts:
            del places.holders[row]  # nearly always
        else:
            for other in {places.let_go(row), places.ghosts.pop(row, None)}:
                if other is not None and other != worker:
                    places.take_out(other, row)
        places.infos.pop(row, None)
        if owner not in self._workers:
            return
        state = self._workers[owner]
        if owner == worker:
            state.unsafe.append(row)
        state.open[unit].num_left -= 1
        if not state.open[unit].num_left:
            self._commit(owner, state, unit)

    def _follow_move(self, owner: int, move: RowMove) -> None:
        """Recall a row of the owner's from whoever has it, and send it on."""
        row, target = int(move.key[0]), move.to - 1
        holder = self._places.holders.get(row)
        if holder is None or holder == target:
            return
        delay = 0.0 if holder == owner else MESSAGE_SECONDS
        self._world.later(delay, lambda: self._recall(row, holder, target))

    def _recall(self, row: int, holder: int, target: int) -> None:
        if self._places.holders.get(row) != holder:
            return
        num_tokens = self._places.take_out(holder, row)
        if num_tokens is None:
            return
        self._places.hold(row, None)
        self._world.num_moves += 1
        self._world.send(row, target, num_tokens)
        self._fill(holder)

    def _follow_share(self, state: WorkerSide, share: Share) -> None:
        for row in state.order.take_for_other(share.num_rows, self._places.is_waiting):
            number = int(row.key[0])
            self._places.hold(number, None)
            self._world.send(number, share.to - 1, row.num_tokens)

    # Workers that are sick, and that leave

    def _decode_again(self, owner: int, holder: int) -> None:
        """Rows of this owner's units that a worker has which is gone or sick."""
        for unit in list(self._workers[owner].open):
            for row in self._workload.rows(unit):
                if self._places.holders.get(row) == holder:
                    if holder in self._workers:
                        self._places.ghosts[row] = holder
                    self._places.put_back(row, 0)

    def _leave_when_due(self, worker: int) -> None:
        """Go when everything is elsewhere, or just before the end, with what is left journaled."""
        state, world = self._workers[worker], self._world
        if state.leaves_at is None:
            return
        is_empty = not state.machine.rows and not state.guests
        if not is_empty and world.now < state.leaves_at - LEAVE_SECONDS:
            return
        left = [(row, world.take_out(worker, row)) for row in list(state.machine.rows)]
        left += state.guests
        del self._workers[worker]
        for unit, opened in state.open.items():
            del self._places.owners[unit]
            self.coordinator.give_back(state.attempt, unit, opened.epoch, world.now)
        self.coordinator.worker_lost(state.attempt, (), world.now)
        world.retire(worker)
        for row, num_tokens in left:
            self._places.put_back(row, num_tokens)
