"""Which waiting row of a worker's open units starts next, and which are given to others.

The rows predicted longest start first, over all units that are open: what starts last is short,
and so is the tail. To look far ahead a worker opens units well before it needs their rows (the
balance says how many it may have). Where more units wait to be opened than may be, the oldest
unit's rows go first, so that it is committed and makes room.

A worker's own object: it holds what is known of each waiting row and the newest `LengthModel`, a
few bytes a row. What it says is a proposal: a row that is no longer waiting is skipped.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bastion_batch.core.lengths import (
    FactColumns,
    LengthModel,
    RowFacts,
    residual,
)
from bastion_batch.records import RowKey

SIBLING_SHARE = 0.5
"""Of the variance of log length that task and prompt leave open, what the samples of one row are
taken to have in common."""
NEWS_PER_SORT = 64
"""Samples that end before the rest of their unit is sorted anew."""


class Waiting(NamedTuple):
    """A row that waits to start, or to go on after the tokens it has."""

    unit: int
    key: RowKey
    num_tokens: int = 0


class Backlog(NamedTuple):
    """What a worker's waiting rows amount to, for its report."""

    num_rows: int = 0
    num_tokens: float = 0.0
    """Expected output tokens of them all."""


class _Begun(NamedTuple):
    """A row that came back, and the tokens still expected of it."""

    expected: float
    row: Waiting


class _Queue:
    """The rows of one unit, the longest first; of equal ones the one that was added first."""

    def __init__(self, serial: int, keys: Sequence[RowKey], facts: FactColumns) -> None:
        self.serial = serial
        """Orders units by when they were opened."""
        self.num_tokens = 0.0
        """Expected of all."""
        self._keys = keys
        self._facts = facts
        self._next = 0
        """Where in the two columns below the longest is."""
        self._left: memoryview = np.arange(len(keys), dtype=np.int32).data
        self._expected: memoryview = np.zeros(len(keys), np.float32).data
        self._siblings: dict[str, list[float]] = {}
        """By row: how many samples have ended, and how far above the mean, in log tokens."""
        self._num_news = 0

    def __len__(self) -> int:
        return len(self._left) - self._next

    @property
    def longest(self) -> float:
        """Expected tokens of the longest."""
        return self._expected[self._next]

    def sort(self, model: LengthModel) -> None:
        """Predict by this model."""
        self._num_news = 0
        left_N = np.asarray(self._left)[self._next :]
        facts = self._facts.at(left_N)
        means_N = model.log_means(facts)
        if self._siblings:
            means_N += [self._row_effect(self._keys[row][0]) for row in left_N.tolist()]
        expected_N = np.minimum(np.exp(means_N + model.spread**2 / 2), facts.limits_N)
        order_N = np.lexsort((left_N, -expected_N))
        expected_N = expected_N[order_N].astype(np.float32)
        self._next, self._left, self._expected = 0, left_N[order_N].data, expected_N.data
        self.num_tokens = float(expected_N.sum(dtype=np.float64))

    def ended(self, key: RowKey, log_excess: float, model: LengthModel) -> None:
        """A sample has ended so far above its mean; the row's others are sorted anew in time."""
        ended = self._siblings.setdefault(key[0], [0.0, 0.0])
        ended[0] += 1
        ended[1] += log_excess
        self._num_news += 1
        if self._num_news >= NEWS_PER_SORT:
            self.sort(model)

    def pop(self) -> RowKey:
        """Take out the longest."""
        at = self._next
        self._next = at + 1
        self.num_tokens = max(self.num_tokens - self._expected[at], 0.0)
        return self._keys[self._left[at]]

    def _row_effect(self, row_id: str) -> float:
        count, excess = self._siblings.get(row_id, (0.0, 0.0))
        return SIBLING_SHARE * excess / (1 + max(count - 1, 0.0) * SIBLING_SHARE)


class RowOrder:
    """The waiting rows of one worker's open units. Not safe for threads."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        """Those with rows, by unit, oldest first."""
        self._num_added = 0
        self._heads: list[tuple[float, int, int]] | None = []
        """A heap of the longest row of every queue: its tokens negated, serial, unit. None: stale."""
        self._started: dict[int, list[_Begun]] = {}
        self._model = LengthModel()
        self._oldest_first = False

    def add(self, unit: int, keys: Sequence[RowKey], facts: FactColumns) -> None:
        """A unit was opened: these rows of it wait."""
        if len(keys):
            queue = self._queues[unit] = _Queue(self._num_added, keys, facts)
            queue.sort(self._model)
            self._num_added += 1
            self._heads = None

    def put_back(self, unit: int, key: RowKey, facts: RowFacts, num_tokens: int = 0) -> None:
        """A row that was taken out waits again, with the tokens it has got meanwhile."""
        expected = residual(
            self._model.log_mean(facts), self._model.spread, num_tokens, facts.max_new_tokens
        )
        rows = self._started.setdefault(unit, [])
        insort(rows, _Begun(expected, Waiting(unit, key, num_tokens)), key=lambda row: row.expected)

    def ended(self, unit: int, key: RowKey, facts: RowFacts, num_tokens: int) -> None:
        """A sample of a row has ended: the row's other samples will be more like it."""
        queue = self._queues.get(unit)
        if queue is not None:
            log_excess = math.log(max(num_tokens, 1)) - self._model.log_mean(facts)
            queue.ended(key, log_excess, self._model)
            self._heads = None

    def drop_unit(self, unit: int) -> None:
        """The unit is committed or given back."""
        if self._queues.pop(unit, None) is not None:
            self._heads = None
        self._started.pop(unit, None)

    def learn(self, model: LengthModel) -> None:
        """Predict by this model from now on."""
        self._model = model
        for queue in self._queues.values():
            queue.sort(model)
        self._heads = None

    def finish_oldest(self, oldest_first: bool) -> None:
        """Whether the oldest unit is to be got done: `Orders.oldest_first`."""
        self._oldest_first = oldest_first

    def next(self, is_waiting: Callable[[int, RowKey], bool]) -> Waiting | None:
        """Take out the row to start next; rows that are not waiting any more are forgotten."""
        while True:
            row = self._pop()
            if row is None or is_waiting(row.unit, row.key):
                return row

    def take_for_other(
        self, num_rows: int, is_waiting: Callable[[int, RowKey], bool]
    ) -> list[Waiting]:
        """Take out rows for a worker that has too few: those that would start next here."""
        taken: list[Waiting] = []
        while len(taken) < num_rows and (row := self.next(is_waiting)) is not None:
            taken.append(row)
        return taken

    def backlog(self) -> Backlog:
        """What waits; a row that is no longer waiting may still be counted."""
        begun = [row.expected for rows in self._started.values() for row in rows]
        return Backlog(
            sum(map(len, self._queues.values())) + len(begun),
            sum(queue.num_tokens for queue in self._queues.values()) + sum(begun),
        )

    def _pop(self) -> Waiting | None:
        for rows in self._started.values():
            if rows:
                return rows.pop().row
        if not self._queues:
            return None
        unit = next(iter(self._queues)) if self._oldest_first else self._unit_of_longest()
        queue = self._queues[unit]
        key = queue.pop()
        self._take_note(unit, queue)
        return Waiting(unit, key)

    def _unit_of_longest(self) -> int:
        if self._heads is None:
            self._heads = [(-q.longest, q.serial, unit) for unit, q in self._queues.items()]
            heapq.heapify(self._heads)
        return self._heads[0][2]

    def _take_note(self, unit: int, queue: _Queue) -> None:
        """The longest row of a queue was taken out."""
        if not len(queue):
            del self._queues[unit]
        heads = self._heads
        if heads is None or heads[0][2] != unit:
            self._heads = None
        elif len(queue):
            heapq.heapreplace(heads, (-queue.longest, queue.serial, unit))
        else:
            heapq.heappop(heads)
