"""The journal: rows that have ended in units that are still open, and the prefixes of others.

    _bastion/journal/<worker>-<attempt>-<n>.arrow    one object per worker and flush

A cache: it saves decoding again and decides nothing. Whatever cannot be read is passed over, and
so is what another job wrote; an entry that is there twice counts once; where entries of one
sample differ, the one that is further counts. An entry is whole: a row's tokens and its step
records travel together, or the row starts again.

Of a sample it may say three things: its outcome; its prefix, when the worker had to leave; and
which engines ended while it was in them. Objects whose units are all committed are of no use,
and are removed. Nothing here raises an `OSError`: a full disk costs decoding again, not the job.
"""

import json
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from bastion_batch.io.journal_rows import JOURNAL_SCHEMA, Entry, Saved, from_table, to_table
from bastion_batch.io.layout import JOURNAL, journal_attempt_of, journal_name
from bastion_batch.io.plan import Plan
from bastion_batch.io.store import Store
from bastion_batch.records import End, Outcome, RowKey

__all__ = ["Entry", "Journal", "JournalReader", "Journaled", "Saved", "remove_journal"]

_KEY = b"bastion_batch"
_UNREADABLE = (pa.ArrowException, KeyError, TypeError, ValueError)

logger = logging.getLogger(__name__)


class _Header(NamedTuple):
    """What an object says of itself in its schema's metadata."""

    identity: str
    units: frozenset[int]


@dataclass(slots=True)
class Journaled:
    """What the journal knows of one unit."""

    outcomes: dict[RowKey, Outcome] = field(default_factory=dict)
    prefixes: dict[RowKey, Saved] = field(default_factory=dict)
    """Of samples without an outcome."""
    ends: dict[RowKey, frozenset[End]] = field(default_factory=dict)


class Journal:
    """Writes one attempt's objects."""

    def __init__(self, store: Store, plan: Plan, worker: str, attempt: int) -> None:
        self._store = store
        self._identity = identity_of(plan)
        self._worker = worker
        self._attempt = attempt
        self._num_written = 0
        self._open: dict[str, set[int]] = {}
        self._degraded = False

    def write(self, entries: Collection[Entry]) -> bool:
        """Write these entries as one object; false when that failed, which is said once."""
        if not entries:
            return True
        name = journal_name(self._worker, self._attempt, self._num_written)
        self._num_written += 1  # a failed write may have made the name
        units = {entry.unit for entry in entries}
        self._open[name] = set(units)
        header = json.dumps({"identity": self._identity, "units": sorted(units)})
        try:
            self._store.put(name, _payload(to_table(entries), header))
        except OSError as error:
            self._degrade(error)
            return False
        self._degraded = False
        return True

    def retire(self, committed: Collection[int]) -> None:
        """These units are committed: remove the objects of this attempt that hold no others."""
        for name, units in list(self._open.items()):
            units.difference_update(committed)
            if not units and _remove(self._store, name):
                del self._open[name]

    def _degrade(self, error: OSError) -> None:
        if not self._degraded:
            self._degraded = True
            logger.warning(
                "the journal cannot be written (%s): decoding goes on, and what is lost with a "
                "worker is decoded again",
                error,
            )


class JournalReader:
    """Finds what any attempt has journaled of a unit. Reads each object's header once."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._identity = identity_of(plan)
        self._units: dict[str, frozenset[int]] = {}
        self._first_names: list[str] | None = None

    def read(self, unit: int, *, before_attempt: int | None = None) -> Journaled:
        """All that can be read of a unit now.

        With `before_attempt`, only what earlier attempts had written when this reader was first
        used: a unit that nobody has owned since needs no other look at the journal.
        """
        if before_attempt is None:
            names = self._names()
        else:
            if self._first_names is None:
                self._first_names = self._names(before_attempt)
            names = self._first_names
        found = Journaled()
        for name in names or ():
            if unit in self._units[name]:
                for entry in self._entries(name):
                    if entry.unit == unit:
                        _merge(found, entry)
        for key in found.outcomes:
            found.prefixes.pop(key, None)
        return found

    def _names(self, before_attempt: int | None = None) -> list[str] | None:
        """The objects that there are, after a look at the headers of new ones; None: no answer."""
        try:
            names = self._store.names(JOURNAL)
        except OSError as error:
            logger.warning("the journal cannot be listed: %s", error)
            return None
        if before_attempt is not None:
            names = [name for name in names if (journal_attempt_of(name) or 0) < before_attempt]
        for name in names:
            if name not in self._units:
                self._units[name] = self._units_of(name)
        return names

    def _units_of(self, name: str) -> frozenset[int]:
        try:
            with self._store.open(name) as file:
                header = _header(file)
        except (OSError, *_UNREADABLE) as error:
            logger.warning("%s is passed over: %r", name, error)
            return frozenset()
        return header.units if header.identity == self._identity else frozenset()

    def _entries(self, name: str) -> Iterator[Entry]:
        try:
            with self._store.open(name) as file:
                entries = list(from_table(pa.ipc.open_file(file).read_all()))
        except (OSError, *_UNREADABLE) as error:
            logger.warning("%s is passed over: %r", name, error)
            return
        yield from entries


def remove_journal(store: Store, committed: Collection[int]) -> int:
    """Remove the objects of any attempt that hold committed units only, and return how many.

    Of a complete job that is all of them. What cannot be read is removed too: objects are
    created whole, so it will never be of use.
    """
    committed = frozenset(committed)
    num_removed = 0
    for name in store.names(JOURNAL):
        try:
            with store.open(name) as file:
                is_done = _header(file).units <= committed
        except FileNotFoundError:
            continue
        except _UNREADABLE:
            is_done = True
        num_removed += is_done and _remove(store, name)
    return num_removed


def identity_of(plan: Plan) -> str:
    """Tells entries of this job from any other's."""
    text = json.dumps([plan.job_id, plan.identity], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _payload(table: pa.Table, header: str) -> memoryview:
    schema = JOURNAL_SCHEMA.with_metadata({_KEY: header})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table.cast(schema))
    return memoryview(sink.getvalue())


def _header(file: BinaryIO) -> _Header:
    own = json.loads(pa.ipc.open_file(file).schema.metadata[_KEY])
    return _Header(own["identity"], frozenset(own["units"]))


def _merge(found: Journaled, entry: Entry) -> None:
    what = entry.what
    if isinstance(what, Outcome):
        found.outcomes.setdefault(entry.key, what)
    elif isinstance(what, Saved):
        known = found.prefixes.get(entry.key)
        if known is None or len(what.generated_ids) > len(known.generated_ids):
            found.prefixes[entry.key] = what
    else:
        found.ends[entry.key] = found.ends.get(entry.key, frozenset()) | what


def _remove(store: Store, name: str) -> bool:
    try:
        store.remove(name)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", name, error)
        return False
    return True
