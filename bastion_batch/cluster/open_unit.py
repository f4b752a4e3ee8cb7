"""A unit that a worker owns: its rows are decoded here or elsewhere, their outcomes become its files.

Where a sample is says `Places`. An outcome ends that: it may come from anywhere and more than
once, and the first one counts. What another worker decoded is kept there until this one has it
safe, in the journal or in the unit's file: `acknowledged` says once which outcomes those are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from bastion_batch.cluster.facts import facts_of
from bastion_batch.cluster.faults import is_poison, poison
from bastion_batch.cluster.messages import FaultCount, Lease, Refused, UnitSummary
from bastion_batch.cluster.places import Places
from bastion_batch.config import JobConfig
from bastion_batch.core.lengths import FactColumns, RowFacts
from bastion_batch.core.noise import row_key
from bastion_batch.io.commit import commit_unit
from bastion_batch.io.journal import Entry, Journaled
from bastion_batch.io.plan import Plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitRows
from bastion_batch.io.retry import Retry
from bastion_batch.io.sinks import UnitBuilder
from bastion_batch.io.store import Store
from bastion_batch.records import (
    Completion,
    End,
    Exported,
    Outcome,
    Prefix,
    Request,
    RowFault,
    RowKey,
)

_RECORD_BYTES = 500
"""About what a step record takes in memory."""


class Owner(NamedTuple):
    """What all units of one worker share."""

    worker: str
    attempt: int
    device: str
    dtype: str
    job: JobConfig
    plan: Plan
    store: Store
    renderer: PromptRenderer
    check: Callable[[int], RowFault | None]
    """Why a prompt of so many tokens cannot be decoded, or None."""
    retry: Retry | None = None
    """Set when the units are committed, and rows of them that failed are decoded again."""


class OpenUnit:
    """The samples of one leased unit, from its first row to its commit."""

    def __init__(self, lease: Lease, rows: UnitRows, journaled: Journaled, owner: Owner) -> None:
        self.lease = lease
        self.num_failed = 0
        self._owner = owner
        self._rows = rows
        self._positions = {row_id: i for i, row_id in enumerate(rows.row_ids)}
        self._retried = (
            None if owner.retry is None else owner.retry.open(owner.store, owner.plan, lease.unit)
        )
        self._builder = UnitBuilder(
            owner.plan if self._retried is None else self._retried.plan,
            lease.unit,
            rows,
            owner.worker,
            owner.attempt,
            owner.device,
            dtype=owner.dtype,
            only=None if self._retried is None else self._retried.again,
        )
        self._num_outputs = len(self._builder.row_keys())
        source = owner.job.input
        column = rows.table.column(source.prompt or source.messages)
        self._facts = facts_of(
            column.to_pylist(),
            owner.job.decoding.max_new_tokens,
            are_chats=source.messages is not None,
        )
        self._ends = _all_ends(lease, journaled)
        self._ends_to_journal = {(s.row_id, s.sample_index) for s in lease.suspects}
        self._to_journal: dict[RowKey, Outcome] = {}
        self._owed: dict[RowKey, set[int]] = {}
        self._faults: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._rendered: tuple[int, tuple[int, ...] | RowFault] | None = None
        self._num_outcome_bytes = 0
        pending = [(rows.row_ids[i], sample) for i, sample in self._builder.pending()]
        self.places = Places(pending, journaled.prefixes, self._ends)
        self._count_unreadable()
        self._use(journaled)

    def _count_unreadable(self) -> None:
        for row_id, sample in self._builder.row_keys():
            fault = self._rows.faults[self._positions[row_id]]
            if fault is not None and (row_id, sample) not in self.places:
                self._count_fault(fault)

    def _use(self, journaled: Journaled) -> None:
        """Take the outcomes of before; rows that end engines fail."""
        for key, outcome in journaled.outcomes.items():
            if key in self.places:
                self.add(outcome)
                self._to_journal.pop(key)
        for key, ends in self._ends.items():
            if key in self.places and is_poison(ends, lone_worker=self.lease.lone_worker):
                self._fail(key, poison(ends))

    # How far it is

    @property
    def number(self) -> int:
        """The unit."""
        return self.lease.unit

    @property
    def complete(self) -> bool:
        """Whether every sample has its outcome."""
        return self._builder.complete

    @property
    def num_terminal(self) -> int:
        """Samples that have their outcome."""
        return self._num_outputs - len(self.places)

    @property
    def num_bytes(self) -> int:
        """About what the unit holds in memory."""
        return self._rows.table.nbytes + self._num_outcome_bytes

    @property
    def has_siblings(self) -> bool:
        """Whether its rows have several samples each."""
        return self._owner.plan.samples_per_row > 1

    def is_suspect(self, key: RowKey) -> bool:
        """Whether a sample was in an engine when it ended."""
        return bool(self._ends.get(key))

    def faults(self) -> list[FaultCount]:
        """Its row faults so far, by kind."""
        return [
            FaultCount(self.number, kind, count, self._examples[kind])
            for kind, count in self._faults.items()
        ]

    def refused(self) -> list[Refused]:
        """Samples that some engine could not decode, and nobody tries now."""
        places = self.places
        return [Refused(self.number, *key, tuple(places.refusals[key])) for key in places.parked]

    def facts(self, key: RowKey) -> RowFacts:
        """What tells of the length of a sample's output."""
        i = self._positions[key[0]]
        groups_N, sizes_N, limits_N = self._facts
        return RowFacts(int(groups_N[i]), float(sizes_N[i]), int(limits_N[i]))

    def facts_of(self, keys: Sequence[RowKey]) -> FactColumns:
        """The same of many samples."""
        positions = [self._positions[row_id] for row_id, _ in keys]
        groups_N, sizes_N, limits_N = self._facts
        return FactColumns(groups_N[positions], sizes_N[positions], limits_N[positions])

    # Its rows, on their way to an engine

    def next_suspect(self) -> Prefix | None:
        """Take the next suspect out, to be decoded alone; None if its row is at fault."""
        return self.take(next(iter(self.places.suspects)))

    def take(self, key: RowKey) -> Prefix | None:
        """Take a sample out with its tokens; None if it is not here to be taken, or at fault."""
        if not self.places.take(key):
            return None
        request = self._request(key)
        if request is None:
            return None
        saved = self.places.saved.get(key)
        return saved.onto(request) if saved else Prefix(exported=Exported(request))

    def _request(self, key: RowKey) -> Request | None:
        """The request of a sample, or None if its row is at fault."""
        row_id, sample_index = key
        prompt = self._prompt(self._positions[row_id])
        fault = prompt if isinstance(prompt, RowFault) else self._owner.check(len(prompt))
        if fault is not None:
            self._fail(key, fault, 0 if isinstance(prompt, RowFault) else len(prompt))
            return None
        assert not isinstance(prompt, RowFault)
        decoding = self._owner.job.decoding
        return Request(
            row_id=row_id,
            sample_index=sample_index,
            prompt_ids=prompt,
            sampling=decoding.sampling,
            noise_key=row_key(decoding.seed, row_id, sample_index),
        )

    def _prompt(self, position: int) -> tuple[int, ...] | RowFault:
        """The row's prompt, rendered once for all its samples."""
        if self._rendered is None or self._rendered[0] != position:
            source = self._owner.job.input.prompt or self._owner.job.input.messages
            [row] = self._rows.table.select([source]).slice(position, 1).to_pylist()
            self._rendered = position, self._owner.renderer.render(row)
        return self._rendered[1]

    # Their outcomes

    def add(self, outcome: Outcome, sender: int | None = None) -> bool:
        """Take an outcome, unless there is one; `sender` keeps it until told that it is safe.

        Returns whether it was taken.
        """
        if sender is not None:
            self._owed.setdefault(outcome.key, set()).add(sender)
        if not self.places.settle(outcome.key):
            return False
        done = outcome.completion
        self._builder.add(done, outcome.num_migrations, outcome.stretches)
        if done.fault is None:  # a fault is found again, or is gone with what caused it
            self._to_journal[outcome.key] = outcome
        self._num_outcome_bytes += (
            len(done.text) + 8 * len(done.output_ids) + _RECORD_BYTES * len(done.records)
        )
        if done.fault is not None:
            self._count_fault(done.fault)
        return True

    def give_up(self, key: RowKey) -> None:
        """Nobody is left to try a refused sample: the last refusal is its outcome."""
        if key in self.places.parked:
            self._fail(key, list(self.places.refusals[key].values())[-1])

    def _fail(self, key: RowKey, fault: RowFault, num_prompt_tokens: int = 0) -> None:
        completion = Completion(
            row_id=key[0],
            sample_index=key[1],
            output_ids=(),
            text="",
            finish_reason="error",
            fault=fault,
            num_prompt_tokens=num_prompt_tokens,
            num_steps=0,
        )
        self.add(Outcome(completion=completion, stretches=()))

    def _count_fault(self, fault: RowFault) -> None:
        self.num_failed += 1
        self._faults[fault.kind] += 1
        self._examples.setdefault(fault.kind, fault.message)

    # Keeping them

    def to_journal(self) -> list[Entry]:
        """Outcomes and suspicions that are not yet in the journal."""
        outcomes = [Entry(self.number, key, what) for key, what in self._to_journal.items()]
        ends = [Entry(self.number, key, self._ends[key]) for key in self._ends_to_journal]
        return outcomes + ends

    def unsafe_outcomes(self) -> list[Outcome]:
        """Outcomes that are in no file."""
        return list(self._to_journal.values())

    def prefixes_to_journal(self) -> list[Entry]:
        """The tokens of samples without an outcome, as far as they are known here."""
        return [Entry(self.number, key, tokens) for key, tokens in self.places.saved.items()]

    def journaled(self, entries: Iterable[Entry]) -> None:
        """These are in the journal."""
        for entry in entries:
            if isinstance(entry.what, Outcome):
                self._to_journal.pop(entry.key, None)
            else:
                self._ends_to_journal.discard(entry.key)

    def acknowledged(self, *, committed: bool = False) -> dict[int, list[RowKey]]:
        """Outcomes that are safe now, by the attempt that keeps them; each is told once."""
        safe: dict[int, list[RowKey]] = {}
        for key in [key for key in self._owed if committed or key not in self._to_journal]:
            for sender in self._owed.pop(key):
                safe.setdefault(sender, []).append(key)
        return safe

    def commit(self, before_data: Callable[[], None] | None = None) -> UnitSummary:
        """Create the unit's files. Safe to repeat, by this or any other attempt.

        Raises:
            OSError: storage failed, through all retries.
        """
        data, steps = self._builder.tables()
        owner = self._owner
        commit = (
            partial(commit_unit, owner.store, owner.plan, self.number)
            if self._retried is None
            else partial(self._retried.replace, owner.store)
        )
        result = commit(owner.attempt, data, steps, before_data=before_data)
        return UnitSummary(self._num_outputs, self.num_failed, result.won)


def _all_ends(lease: Lease, journaled: Journaled) -> dict[RowKey, frozenset[End]]:
    """What the coordinator knows of this invocation, and the journal of earlier ones."""
    ends = dict(journaled.ends)
    for suspect in lease.suspects:
        key = suspect.row_id, suspect.sample_index
        ends[key] = ends.get(key, frozenset()) | suspect.ends
    return ends
