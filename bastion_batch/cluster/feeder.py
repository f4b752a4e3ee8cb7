"""What a worker's engine is given next: guests, then what the balance has start, suspects alone.

The queue in front of the engine is short, just so that no place in the batch is ever empty: what
waits there is late for whoever could decode it now. A suspect, which may end the engine, enters only when
nothing else is in it and everything else is in the journal.
"""

from collections.abc import Callable

from bastion_batch.cluster.engines import DecodingEngine
from bastion_batch.cluster.exchange import Exchange
from bastion_batch.cluster.live_rows import LiveRows
from bastion_batch.cluster.waiting import MAX_RENDERED_PER_STEP
from bastion_batch.records import RowKey

MAX_OPEN_BYTES = 10**9
MIN_QUEUED = 2
"""Rows in front of a full engine, at least."""


class Feeder:
    """Feeds one engine.

    Args:
        engine: to be fed.
        live: its rows.
        exchange: the units and guests that rows come from.
        before_suspect: makes everything else safe.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        live: LiveRows,
        exchange: Exchange,
        before_suspect: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._live = live
        self._exchange = exchange
        self._before_suspect = before_suspect
        self._alone: RowKey | None = None
        self.fed_suspect = False
        """Whether the last `feed` queued a row that was in an engine when it ended."""

    @property
    def wants_unit(self) -> bool:
        """Whether to ask for another unit: the balance says so, and there is memory."""
        units = self._exchange.open.values()
        return (
            self._exchange.waiting.orders.may_open
            and not self._is_isolating
            and sum(unit.num_bytes for unit in units) < MAX_OPEN_BYTES
        )

    def feed(self) -> bool:
        """Queue the rows that are due; whether some of them run at the next step."""
        num_before = len(self._live)
        self.fed_suspect = False
        if not self._is_isolating:
            self._fill()
        elif not self._engine.has_work:
            self._feed_suspect()
        return num_before < len(self._live) <= self._engine.max_batch

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect is in the engine."""
        return self._alone is not None and self._alone in self._live

    @property
    def _is_isolating(self) -> bool:
        """Whether a suspect is in the engine, or a unit waits for nothing but suspects."""
        units = self._exchange.open.values()
        return self.has_suspect or any(unit.places.only_suspects_left for unit in units)

    def _fill(self) -> None:
        """Guests first: they were sent here to run."""
        room = self._room()
        while room > 0 and (guest := self._exchange.guests.next_waiting()) is not None:
            self._live.add(*guest)
            room -= 1
        max_running = self._exchange.waiting.orders.max_running
        if max_running is not None:
            room = min(room, max_running - len(self._live))
        for _ in range(MAX_RENDERED_PER_STEP):
            started = self._exchange.waiting.next() if room > 0 else None
            if started is None:
                return
            unit, row = started
            if row is not None:
                self._live.add(unit.number, row, unit.facts(row.key))
                self.fed_suspect |= unit.is_suspect(row.key)
                room -= 1

    def _room(self) -> int:
        """How many rows the engine could take, a few of them to wait.

        Where rows wait although places are free, memory is short, and more would only wait.
        """
        engine = self._engine
        num_free = engine.max_batch - engine.num_running
        if engine.num_waiting and num_free > 0:
            num_free = 0
        return num_free + max(MIN_QUEUED, engine.max_batch // 16) - engine.num_waiting

    def _feed_suspect(self) -> None:
        self._before_suspect()
        for unit in self._exchange.open.values():
            row = unit.next_suspect() if unit.places.only_suspects_left else None
            if row is not None:
                self._alone = row.key
                self.fed_suspect = True
                self._live.add(unit.number, row, unit.facts(row.key))
                return
