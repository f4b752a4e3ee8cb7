"""What a worker's engine is given next: guests, then the oldest unit's rows, suspects alone.

The queue in front of the engine is kept as long as its batch, no longer: what waits there is
late for whoever could decode it now. A suspect, which may end the engine, enters only when
nothing else is in it and everything else is in the journal.
"""

from collections.abc import Callable

from bastion_batch.cluster.engines import DecodingEngine
from bastion_batch.cluster.exchange import Exchange
from bastion_batch.cluster.live_rows import LiveRows
from bastion_batch.records import RowKey

MAX_RENDERED_PER_STEP = 32
"""Prompts tokenised between two steps: bounds how long the live rows wait for the next ones."""
MAX_OPEN_BYTES = 10**9


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

    @property
    def wants_unit(self) -> bool:
        """Whether the engine is not full, or has little in reserve, and there is memory.

        A deep reserve would hold rows back from idle workers when the job ends.
        """
        units = self._exchange.open.values()
        if self._is_isolating or sum(unit.num_bytes for unit in units) >= MAX_OPEN_BYTES:
            return False
        num_rows = len(self._live) + sum(len(unit.places.unfed) for unit in units)
        return num_rows < self._engine.max_batch + max(2, self._engine.max_batch // 4)

    def feed(self) -> bool:
        """Queue rows until as many wait as can run; whether some of them run at the next step."""
        num_before = len(self._live)
        if self._is_isolating:
            if not self._engine.has_work:
                self._feed_suspect()
        else:
            self._feed_guests()
            self._feed_own()
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

    @property
    def _has_room(self) -> bool:
        return self._engine.num_waiting < self._engine.max_batch

    def _feed_guests(self) -> None:
        while self._has_room:
            guest = self._exchange.guests.next_waiting()
            if guest is None:
                return
            self._live.add(*guest)

    def _feed_own(self) -> None:
        num_rendered = 0
        for unit in self._exchange.open.values():
            while unit.places.unfed and self._has_room:
                if num_rendered == MAX_RENDERED_PER_STEP:
                    return
                num_rendered += 1
                row = unit.next_row()
                if row is not None:
                    self._live.add(unit.number, row)

    def _feed_suspect(self) -> None:
        self._before_suspect()
        for unit in self._exchange.open.values():
            row = unit.next_suspect() if unit.places.only_suspects_left else None
            if row is not None:
                self._alone = row.key
                self._live.add(unit.number, row)
                return
