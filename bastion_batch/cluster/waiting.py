"""The rows of a worker's open units that wait to start, in the order that the balance wants.

What waits say the units' `Places`. Here `RowOrder` is told of it, and asked; and here is kept what
the balance ordered last. This decides nothing.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bastion_batch.cluster.open_unit import OpenUnit
from bastion_batch.core.lengths import LengthModel
from bastion_batch.core.orders import Backlog, Orders
from bastion_batch.core.row_order import RowOrder, Waiting
from bastion_batch.records import Outcome, Prefix, RowKey

MAX_RENDERED_PER_STEP = 32
"""Prompts tokenised between two steps for the engine, and as many for others: bounds how long the
live rows wait."""


class Started(NamedTuple):
    """A row that waits no longer."""

    unit: OpenUnit
    row: Prefix | None
    """None if the row was at fault, and so has ended."""


class WaitingRows:
    """The waiting rows of the units in `open`, which changes under it."""

    def __init__(self, open_units: Mapping[int, OpenUnit]) -> None:
        self.orders = Orders()
        """The newest."""
        self.model = LengthModel()
        self._open = open_units
        self._order = RowOrder()
        self._known: dict[int, OpenUnit] = {}

    def follow(self, orders: Orders) -> None:
        """Obey these orders from now on; what they say to do once is done elsewhere."""
        self.orders = orders
        self._order.finish_oldest(orders.oldest_first)
        if orders.model is not None:
            self.model = orders.model
            self._order.learn(self.model)

    def next(self) -> Started | None:
        """Take out the row to start next, or None if none waits."""
        self._meet()
        chosen = self._order.next(self._is_waiting)
        return None if chosen is None else self._take(chosen)

    def for_other(self, num_rows: int) -> Iterator[Started]:
        """Take out rows for another worker."""
        self._meet()
        for chosen in self._order.take_for_other(num_rows, self._is_waiting):
            yield self._take(chosen)

    def learn_from(self, unit: OpenUnit, outcome: Outcome) -> None:
        """A sample has ended, here or elsewhere: its row's others may be as long."""
        done = outcome.completion
        if unit.has_siblings and done.fault is None:
            facts = unit.facts(outcome.key)
            self._order.ended(unit.number, outcome.key, facts, done.num_output_tokens)

    def backlog(self) -> Backlog:
        """What waits."""
        self._meet()
        return self._order.backlog()

    def _is_waiting(self, unit: int, key: RowKey) -> bool:
        return unit in self._open and key in self._open[unit].places.unfed

    def _take(self, chosen: Waiting) -> Started:
        unit = self._open[chosen.unit]
        return Started(unit, unit.take(chosen.key))

    def _meet(self) -> None:
        """Tell the order of units and rows which it does not know yet."""
        for number, unit in list(self._known.items()):
            if self._open.get(number) is not unit:
                self._order.drop_unit(number)
                del self._known[number]
        for number, unit in self._open.items():
            if number not in self._known:
                self._known[number] = unit
                unit.places.take_returned()
                new = [key for key in unit.places.unfed if key not in unit.places.saved]
                self._order.add(number, new, unit.facts_of(new))
                returned = [key for key in unit.places.unfed if key in unit.places.saved]
            else:
                returned = unit.places.take_returned()
            for key in returned:
                saved = unit.places.saved.get(key)
                num_tokens = len(saved.generated_ids) if saved else 0
                self._order.put_back(number, key, unit.facts(key), num_tokens)
