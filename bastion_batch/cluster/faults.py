"""When faults of rows stop a job, and which rows stop engines.

A row fault is reproducible and the row's own: it is the row's outcome. Anything else is a fault
of the infrastructure, never an outcome: the row is decoded again. Two rules keep either from
doing harm at scale:

    breaker    when more than half of the first outcomes are row faults of one kind, the job's
               description is at fault, not its rows: the job stops, and units that hold such
               outcomes are not committed
    poison     a row that was in three engines when they ended, of two workers, is an error row;
               after two of them it is decoded alone, which clears the innocent

No clock, no files: bookkeeping of the coordinator and of owners.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from bastion_batch.cluster.messages import FaultCount, Suspect
from bastion_batch.records import End, RowFault, RowKey

BREAKER_OUTCOMES = 20
BREAKER_SUCCESSES = 100
"""After so many the description of the job is proven, whatever comes."""
BREAKER_LAST_OUTCOME = 2_000
"""After so many outcomes without a verdict it is left to `limits.max_failed`."""

POISON_ENDS = 3
POISON_WORKERS = 2
ISOLATED_ENDS = 2

REFUSALS = frozenset({"out_of_memory"})
"""Kinds of fault that are the engine's: another one may decode the row."""


def is_poison(ends: Collection[End], *, lone_worker: bool) -> bool:
    """Whether a row has ended so many engines that no other should meet it.

    Where a job has one worker only, nobody else can be asked.
    """
    num_workers = len({end.worker for end in ends})
    return len(ends) >= POISON_ENDS and (lone_worker or num_workers >= POISON_WORKERS)


def is_isolated(ends: Collection[End]) -> bool:
    """Whether a row is to be decoded with no other row in the engine."""
    return len(ends) >= ISOLATED_ENDS


def poison(ends: Collection[End]) -> RowFault:
    """The outcome of a poisoned row."""
    workers = sorted({end.worker for end in ends})
    return RowFault("poison", f"{len(ends)} engines of {', '.join(workers)} ended with this row")


class Suspicions:
    """The rows that were in engines when these ended, by unit."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[RowKey, frozenset[End]]] = {}

    def blame(self, end: End, rows: Iterable[tuple[int, RowKey]]) -> None:
        """An engine ended with these rows, each given with its unit."""
        for unit, key in rows:
            of_unit = self._ends.setdefault(unit, {})
            of_unit[key] = of_unit.get(key, frozenset()) | {end}

    def of(self, unit: int) -> tuple[Suspect, ...]:
        """The suspects of one unit."""
        return tuple(Suspect(*key, ends) for key, ends in self._ends.get(unit, {}).items())

    def forget(self, unit: int) -> None:
        """The unit is committed."""
        self._ends.pop(unit, None)


class Breaker:
    """Stops a job of which nearly every row fails, before any such row is committed."""

    def __init__(self, num_succeeded: int = 0) -> None:
        """Of a job that has so many outputs from earlier invocations."""
        self._num_succeeded = num_succeeded
        self._settled = num_succeeded >= BREAKER_SUCCESSES
        self.failure: str | None = None
        """Why the job must stop; never withdrawn."""

    @property
    def may_commit_faults(self) -> bool:
        """Whether a unit that holds row faults may be committed."""
        return self._settled

    @property
    def is_decided(self) -> bool:
        """Whether nothing that comes could change the verdict."""
        return self._settled or self.failure is not None

    def committed(self, num_succeeded: int) -> None:
        """Count the successes of a committed unit."""
        self._num_succeeded += num_succeeded

    def judge(self, num_open: int, faults: Collection[FaultCount], *, all_terminal: bool) -> None:
        """Look at the terminal outputs of the units still open.

        Args:
            num_open: how many they are, failed ones included.
            faults: the row faults among them: until the verdict no others are committed.
            all_terminal: whether no output of the job is left to decode.
        """
        if self.is_decided:
            return
        counts: Counter[str] = Counter()
        for fault in faults:
            counts[fault.kind] += fault.count
        num_outcomes = self._num_succeeded + num_open
        num_succeeded = num_outcomes - counts.total()
        if num_succeeded >= BREAKER_SUCCESSES or num_outcomes >= BREAKER_LAST_OUTCOME:
            self._settled = True
            return
        [(kind, count)] = counts.most_common(1) or [("", 0)]
        if num_outcomes >= BREAKER_OUTCOMES and 2 * count > num_outcomes:
            example = next(fault.example for fault in faults if fault.kind == kind)
            self.failure = f"{count} of the first {num_outcomes} outputs failed, {kind}: {example}"
        else:
            self._settled = all_terminal
