"""What a worker makes safe, and when: outcomes in the journal, complete units in their files.

An outcome is safe when it is journaled or committed; only then is whoever decoded it told that it
may forget it. Told to end, a worker makes everything safe in the order in which it would be
missed: outcomes, tokens of rows that have not ended, complete units.
"""

import logging
from collections.abc import Callable, Collection

from bastion_batch.cluster.exchange import Exchange
from bastion_batch.cluster.links import Link
from bastion_batch.io.journal import Entry, Journal

JOURNAL_SECONDS = 30.0

logger = logging.getLogger(__name__)


class Keeper:
    """Journals and commits the units of one attempt.

    Args:
        journal: where to.
        exchange: the units, and the guests of others.
        link: who is told.
        clock: seconds.
        before_data: called between a unit's steps file and its data file.
    """

    def __init__(
        self,
        journal: Journal,
        exchange: Exchange,
        link: Link,
        clock: Callable[[], float],
        before_data: Callable[[], None] | None,
    ) -> None:
        self.may_commit_faults = False
        """Whether units with row faults may be committed: the coordinator says so."""
        self._journal = journal
        self._exchange = exchange
        self._link = link
        self._clock = clock
        self._before_data = before_data
        self._journaled_at = clock()

    def commit_complete(self) -> None:
        """Commit the units in which every sample has its outcome.

        Raises:
            OSError: storage failed, through all retries.
        """
        for unit in list(self._exchange.open.values()):
            if unit.complete and (self.may_commit_faults or not unit.num_failed):
                summary = unit.commit(self._before_data)
                self._exchange.close(unit)
                self._journal.retire({unit.number})
                self._link.committed(unit.lease, summary)
                logger.info(
                    "unit %d: committed, %d outputs, %d failed%s",
                    unit.number,
                    summary.num_outputs,
                    summary.num_failed,
                    "" if summary.won else "; another attempt's file was there first",
                )

    def flush_when_due(self) -> None:
        """Journal every half minute."""
        if self._clock() - self._journaled_at >= JOURNAL_SECONDS:
            self.flush()

    def flush(self, more: Collection[Entry] = ()) -> None:
        """Journal what has ended in open units, and these entries; acknowledge what is safe."""
        self._journaled_at = self._clock()
        entries = {u.number: u.to_journal() for u in self._exchange.open.values()}
        if self._journal.write([*(e for of_unit in entries.values() for e in of_unit), *more]):
            for number, of_unit in entries.items():
                self._exchange.open[number].journaled(of_unit)
                self._exchange.acknowledge(self._exchange.open[number])

    def leave(self) -> None:
        """Make everything safe; what is not complete needs other owners."""
        self.flush(self._exchange.guests_to_journal())
        self.flush(self._exchange.leave())
        self.commit_complete()
        for unit in self._exchange.open.values():
            self._link.give_back(unit.lease)
