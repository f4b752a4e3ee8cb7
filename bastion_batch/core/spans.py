"""Units that wait for an owner, kept so that a span is read as few times as possible.

Pending units form runs: consecutive units of one span.

    free runs     [4 5 6 7]  [12 13]  [20 21 22 23]      lowest first
    held runs     w0: [8 9 10 11]    w1: [0 1 2 3]        one per worker, taken from the front

A worker takes the units of its run in order, so that it streams the span it has open. Without
one it takes the lowest free run; when none is free it takes the upper half of the longest run
that another worker holds. Nobody starves, and a split costs one more opening of the span.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby


class PendingUnits:
    """The pending units of a job. Every unit is in at most one run."""

    def __init__(self, spans: Sequence[int], pending: Iterable[int]) -> None:
        """Start with these units pending; `spans` names the span of every unit of the plan."""
        self._spans = spans
        self._free = list(self._runs(pending))
        heapq.heapify(self._free)
        self._held: dict[int, range] = {}
        self._removed: set[int] = set()
        self._num_pending = sum(stop - start for start, stop in self._free)

    def __len__(self) -> int:
        return self._num_pending

    def take(self, holder: int) -> int | None:
        """Remove and return the next unit for this holder, or None when nothing is pending."""
        while self._num_pending or self._removed:
            run = self._held.pop(holder, None) or self._lowest_free() or self._half_of_longest()
            if not run:
                return None
            if len(run) > 1:
                self._held[holder] = run[1:]
            if run[0] not in self._removed:
                self._num_pending -= 1
                return run[0]
            self._removed.discard(run[0])
        return None

    def put_back(self, units: Iterable[int]) -> None:
        """Make units pending again."""
        returned = sorted(units)
        self._num_pending += len(returned)
        self._push(returned)

    def remove(self, unit: int) -> None:
        """A pending unit needs no owner any more."""
        self._removed.add(unit)
        self._num_pending -= 1

    def release(self, holder: int) -> None:
        """Free the rest of the run that this holder had."""
        self._push(self._held.pop(holder, range(0)))

    def _push(self, units: Iterable[int]) -> None:
        for run in self._runs(units):
            heapq.heappush(self._free, run)

    def _lowest_free(self) -> range | None:
        return range(*heapq.heappop(self._free)) if self._free else None

    def _half_of_longest(self) -> range | None:
        if not self._held:
            return None
        victim, run = max(self._held.items(), key=lambda item: len(item[1]))
        middle = len(run) // 2
        del self._held[victim]
        if middle:
            self._held[victim] = run[:middle]
        return run[middle:]

    def _runs(self, units: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Start and stop of each run among these units, which are in increasing order."""
        # Within a run, a unit less its rank is constant.
        for _, run in groupby(enumerate(units), lambda e: (self._spans[e[1]], e[1] - e[0])):
            members = [unit for _, unit in run]
            yield members[0], members[-1] + 1
