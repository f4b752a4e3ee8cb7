"""Balances for tests of what obeys them."""

from collections import Counter, defaultdict

from bastion_batch.core.balance import Balance
from bastion_batch.core.orders import Eta, Orders, RowMove, WorkerView
from bastion_batch.core.spans import PendingUnits


class PlainBalance(Balance):
    """First come, first served; what else it orders, a test says.

    A worker is given a unit when it has fewer rows than its batch and two more.
    """

    def __init__(self, *, spans, num_outputs, done=(), max_open_units=8):
        self.num_outputs = num_outputs
        self.max_open_units = max_open_units
        self.pending = PendingUnits(spans, (u for u in range(len(spans)) if u not in set(done)))
        self.finished = set(done)
        self.owners = {}
        self.batches = {}
        self.leaving = set()
        self.num_rows = Counter()
        self.statuses = {}
        self.progressed_at = {}
        self.orders = defaultdict(Orders)
        """Of each worker, at its next report and from then on; moves and shares once."""
        self.sick_workers = frozenset()
        self.to_take_back = []
        self.next_eta: Eta | None = None
        self.views: dict[int, WorkerView] = {}

    def force(self, unit, key, to):
        """Have a row moved, if its unit has an owner."""
        if unit in self.owners:
            self.say(self.owners[unit], moves=(RowMove(unit, key, to),))

    def say(self, worker, *, moves=(), shares=(), **orders):
        """Order this at a worker's next report."""
        before = self.orders[worker]
        self.orders[worker] = before._replace(
            moves=before.moves + tuple(moves), shares=before.shares + tuple(shares), **orders
        )

    def join(self, worker, *, kind, max_batch, now):
        self.batches[worker] = max_batch
        self.progressed_at[worker] = now

    def lose(self, worker, done=()):
        self.batches.pop(worker, None)
        units = [unit for unit, owner in self.owners.items() if owner == worker]
        self.give_back([unit for unit in units if unit not in done])
        self.pending.release(worker)

    def dismiss(self, worker):
        self.leaving.add(worker)
        self.pending.release(worker)

    def lease(self, worker, now):
        num_open = sum(owner == worker for owner in self.owners.values())
        max_batch, num_rows = self.batches[worker], self.num_rows[worker]
        has_many = num_open >= self.max_open_units and (
            num_rows >= max_batch or worker not in self.statuses
        )
        if has_many or (num_open and num_rows >= max_batch + 2):
            return None
        while (unit := self.pending.take(worker)) in self.finished:
            pass
        if unit is not None:
            self.owners[unit] = worker
            self.num_rows[worker] += self.num_outputs[unit]
        return unit

    def finish(self, unit):
        self.owners.pop(unit, None)
        self.finished.add(unit)

    def give_back(self, units):
        for unit in units:
            del self.owners[unit]
        self.pending.put_back(units)

    def report(self, worker, status, now):
        self.num_rows[worker] = status.backlog.num_rows + len(status.running)
        if not status.running or status.sample is not None:
            self.progressed_at[worker] = now
        self.statuses[worker] = status
        orders = self.orders[worker]
        self.orders[worker] = orders._replace(moves=(), shares=(), model=None)
        return orders

    def other_worker(self, refused_by):
        others = [w for w in self.batches if w not in refused_by and w not in self.leaving]
        return min(others, key=lambda w: len(self._running(w)), default=None)

    def _running(self, worker):
        status = self.statuses.get(worker)
        return status.running if status else ()

    def sick(self, now):
        return self.sick_workers

    def take_back(self, now):
        units = [unit for unit in self.to_take_back if unit in self.owners]
        self.to_take_back = []
        self.give_back(units)
        return units

    def stuck(self, now, no_progress_seconds):
        return [w for w in self.batches if now - self.progressed_at[w] > no_progress_seconds]

    def eta(self, now):
        return self.next_eta

    def workers(self):
        return self.views


class MovingBalance(Balance):
    """The real one, which also has rows moved, and units taken back, as a test says."""

    def __init__(self, **units):
        super().__init__(**units)
        self.sick_workers = frozenset()
        """Besides those that it finds itself."""
        self._asked = []
        self._unwanted = []
        self._leased_to = {}

    def force(self, unit, key, to):
        """Have a row moved, if its unit has an owner."""
        self._asked.append(RowMove(unit, key, to))

    def lease(self, worker, now):
        unit = super().lease(worker, now)
        if unit is not None:
            self._leased_to[unit] = worker
        return unit

    def report(self, worker, status, now):
        orders = super().report(worker, status, now)
        moves = [move for move in self._asked if self._leased_to.get(move.unit) == worker]
        self._asked = [move for move in self._asked if move not in moves]
        return orders._replace(moves=(*orders.moves, *moves))

    def force_back(self, unit):
        """Have a unit taken from its owner."""
        self._unwanted.append(unit)

    def take_back(self, now):
        units = super().take_back(now)
        mine = [unit for unit in dict.fromkeys(self._unwanted) if unit in self._owners]
        self._unwanted = []
        self.give_back(mine)
        return [*units, *mine]

    def sick(self, now):
        return super().sick(now) | self.sick_workers
