"""Where the samples of an open unit are, as long as they have no outcome.

Every one of them is in one place:

    unfed     to be decoded, from its prompt or after the tokens that it has
    suspect   as unfed, but alone in the engine: engines have ended with it
    here      in this worker's engine, which knows it; nothing is kept of that here
    away      with another worker
    parked    an engine refused it; the coordinator says who tries next

A sample leaves for good when it gets an outcome, from wherever that comes: the text is the same.
Its tokens so far are remembered wherever it is, so that it need not start again if it gets lost.
"""

from collections.abc import Collection, Iterable, Mapping

from bastion_batch.cluster.faults import is_isolated
from bastion_batch.io.journal import Saved
from bastion_batch.records import End, Prefix, RowFault, RowKey


class Places:
    """The samples of one unit that have no outcome.

    Args:
        pending: all of them; they are unfed.
        saved: what is known of their tokens.
        ends: the engines that ended while a sample was in them.
    """

    def __init__(
        self,
        pending: Iterable[RowKey],
        saved: Mapping[RowKey, Saved],
        ends: Mapping[RowKey, Collection[End]],
    ) -> None:
        self.unfed: dict[RowKey, None] = dict.fromkeys(pending)
        self.suspects: dict[RowKey, None] = {}
        self.away: dict[RowKey, int] = {}
        """Which attempt has a sample."""
        self.destinations: dict[RowKey, int] = {}
        """Where a sample goes that has been called back."""
        self.parked: dict[RowKey, None] = {}
        self.refusals: dict[RowKey, dict[int, RowFault]] = {}
        """Why which attempts have refused a sample, wherever it is now."""
        self._returned: list[RowKey] = []
        self._open = set(self.unfed)
        self._saved = {key: tokens for key, tokens in saved.items() if key in self._open}
        self._isolated = {key for key, engines in ends.items() if is_isolated(engines)}
        for key in [key for key in self.unfed if key in self._isolated]:
            del self.unfed[key]
            self.suspects[key] = None

    def __contains__(self, key: RowKey) -> bool:
        """Whether a sample has no outcome."""
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def only_suspects_left(self) -> bool:
        """Whether what is left to decode here must be decoded alone."""
        return bool(self.suspects) and not self.unfed

    @property
    def only_parked_left(self) -> bool:
        """Whether nothing can be done but to try refused samples elsewhere, or to give up."""
        return len(self.parked) == len(self._open)

    @property
    def saved(self) -> Mapping[RowKey, Saved]:
        """The samples of which there are tokens."""
        return self._saved

    def is_movable(self, key: RowKey) -> bool:
        """Whether a sample may be decoded elsewhere: suspects are decoded here, alone."""
        return key in self._open and key not in self._isolated

    def take_returned(self) -> list[RowKey]:
        """Samples that came to be unfed again since the last call; some may be so no longer."""
        returned, self._returned = self._returned, []
        return returned

    def settle(self, key: RowKey) -> bool:
        """The sample has an outcome; false if it had one before."""
        is_new = key in self._open
        self._leave(key)
        self._open.discard(key)
        self._saved.pop(key, None)
        return is_new

    def take(self, key: RowKey) -> bool:
        """Take a sample out, to an engine; false if it is not here to be taken."""
        is_here = any(key in place for place in (self.unfed, self.suspects, self.parked))
        if is_here:
            self._leave(key)
        return is_here

    def put_back(self, row: Prefix) -> None:
        """The sample is to be decoded here, unless it goes elsewhere again."""
        self._leave(row.key)
        if row.key in self._open:
            self.remember(row)
            self._wait(row.key)

    def remember(self, row: Prefix) -> None:
        """Keep a sample's tokens, unless more of them are known."""
        known = self._saved.get(row.key)
        if row.num_tokens > (len(known.generated_ids) if known else 0):
            self._saved[row.key] = Saved.of(row)

    def send_away(self, key: RowKey, attempt: int) -> None:
        """Another attempt has the sample."""
        if key in self._open:
            self._leave(key)
            self.away[key] = attempt

    def lose(self, keys: Iterable[RowKey]) -> None:
        """Those of these samples that are away are there no longer."""
        for key in [key for key in keys if key in self.away]:
            self._leave(key)
            self._wait(key)

    def adopt(self, key: RowKey) -> None:
        """The sample is in this worker's engine."""
        self._leave(key)

    def refuse(self, row: Prefix, attempt: int, fault: RowFault) -> None:
        """An engine cannot decode the sample."""
        self._leave(row.key)
        if row.key in self._open:
            self.remember(row)
            self.refusals.setdefault(row.key, {})[attempt] = fault
            self.parked[row.key] = None

    def _wait(self, key: RowKey) -> None:
        if key in self._isolated:
            self.suspects[key] = None
        else:
            self.unfed[key] = None
            self._returned.append(key)

    def _leave(self, key: RowKey) -> None:
        for place in (self.unfed, self.suspects, self.parked, self.away, self.destinations):
            place.pop(key, None)
