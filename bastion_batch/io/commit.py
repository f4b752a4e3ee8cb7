"""Committing units: a unit is done when its final name in `data/` exists.

    steps/u00000123-a7.parquet   first, under a name of this attempt's own
    data/u00000123.parquet       then, by put-if-absent; its footer names the steps files that count

Of several attempts at a unit exactly one creates the name. An attempt that finds the name taken
reads the footer: its own attempt there means that it won and the answer was lost; another's means
that it lost, and it removes its own steps file, nothing else.

Where put-if-absent is a plain overwrite (`Plan.conditional_put` is false) the last attempt's file
stands, whole, and so do all steps files: a request that is still under way may yet replace the
data, and the steps that it names must be there then.
"""

import errno
import json
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import OutputError
from bastion_batch.io.layout import (
    ATTEMPTS_PER_INVOCATION,
    DATA,
    INVOCATIONS,
    STEPS,
    attempt_of,
    data_name,
    steps_name,
    unit_of,
)
from bastion_batch.io.plan import Plan
from bastion_batch.io.store import Output, Store, open_store, prepare_output

__all__ = [
    "Commit",
    "Footer",
    "claim_invocation",
    "commit_unit",
    "committed_footers",
    "committed_units",
    "data_name",
    "prepare_output",
    "read_footer",
    "remove_orphan_steps",
    "replace_unit",
    "steps_name",
]

T = TypeVar("T")

_FOOTER_KEY = b"bastion_batch"


class Commit(NamedTuple):
    """How an attempt at a unit ended."""

    won: bool
    attempt: int
    """The attempt whose file stands."""


class Footer(NamedTuple):
    """What a committed file says of itself."""

    job_id: str
    unit: int
    attempt: int
    steps: tuple[str, ...]
    """Names of the steps files that count."""
    recorded: str
    """Which steps are in them, as `Plan.steps` says it."""
    num_outputs: int


class _Files(NamedTuple):
    """What one attempt has to write for one unit."""

    unit: int
    attempt: int
    steps: memoryview | None
    data: memoryview

    @property
    def steps_name(self) -> str:
        return steps_name(self.unit, self.attempt)

    @property
    def data_name(self) -> str:
        return data_name(self.unit)


def claim_invocation(output: Output) -> int:
    """The number of this invocation of the job: 1, 2, ..., never given twice."""
    store = open_store(output)
    nonce = uuid4().hex
    number = 1 + len(store.names(INVOCATIONS))
    while not _claim(store, number, nonce):
        number += 1
    return number


def _claim(store: Store, number: int, nonce: str) -> bool:
    name = f"{INVOCATIONS}/{number:08d}.json"
    payload = json.dumps({"invocation": number, "nonce": nonce}).encode()
    if store.exists(name):
        return False
    store.put_if_absent(name, payload)
    return store.read(name) == payload


def committed_units(output: Output) -> set[int]:
    """The units that are done, by listing `data/`."""
    units = (unit_of(name) for name in open_store(output).names(DATA))
    return {unit for unit in units if unit is not None}


def commit_unit(
    output: Output,
    plan: Plan,
    unit: int,
    attempt: int,
    data: pa.Table,
    steps: pa.Table | None,
    *,
    before_data: Callable[[], None] | None = None,
) -> Commit:
    """Commit a unit, unless it is committed already.

    May be called again after any error: what the first call achieved counts. `before_data` is
    called between the steps file and the data file.

    Raises:
        OSError: storage failed, through all of the store's retries, and as far as can be seen the
            unit is not committed; it names the file.
    """
    store = open_store(output)
    files = _files(plan, unit, attempt, data, steps)

    def commit() -> Commit:
        if not store.exists(files.data_name):
            _put_steps(store, files)
            if before_data is not None:
                before_data()
            if _put_data(store, files):
                return Commit(won=True, attempt=attempt)
        return _settle(store, plan, files)

    return _insist(store, files, commit)


def replace_unit(
    output: Output,
    plan: Plan,
    unit: int,
    attempt: int,
    data: pa.Table,
    steps: pa.Table | None,
    *,
    replaced: str,
    before_data: Callable[[], None] | None = None,
) -> Commit:
    """Replace a committed unit whole, if its file still has the version `replaced`.

    The version is `Store.version` of the data file from before it was read. `steps` holds the
    records of all its rows: the new footer names this attempt's file alone. The old one stays,
    for who still reads the old footer, until `remove_orphan_steps`. `before_data` as of
    `commit_unit`.

    Raises:
        OSError: as `commit_unit`.
    """
    store = open_store(output)
    files = _files(plan, unit, attempt, data, steps)

    def replace() -> Commit:
        if store.version(files.data_name) == replaced:
            _put_steps(store, files)
            if before_data is not None:
                before_data()
            if store.replace_if(files.data_name, files.data, replaced):
                return Commit(won=True, attempt=attempt)
        return _settle(store, plan, files)

    return _insist(store, files, replace)


def _files(plan: Plan, unit: int, attempt: int, data: pa.Table, steps: pa.Table | None) -> _Files:
    has_steps = steps is not None and steps.num_rows > 0
    footer: dict[str, object] = {
        "job_id": plan.job_id,
        "unit": unit,
        "attempt": attempt,
        "steps": [steps_name(unit, attempt)] if has_steps else [],
        "recorded": plan.steps,
        "bastion_batch": _package_version(),
    }
    return _Files(unit, attempt, _parquet(steps) if has_steps else None, _parquet(data, footer))


def _insist(store: Store, files: _Files, function: Callable[[], T]) -> T:
    """The function's result, after as many tries as the store's retries allow."""
    path = f"{store.root}/{files.data_name}"
    try:
        return store.retries.call(function, what=f"commit of {path}")
    except OSError as error:
        reason = f"unit {files.unit} cannot be committed: {error.strerror or error}"
        raise OSError(error.errno or errno.EIO, reason, path) from error


def _put_steps(store: Store, files: _Files) -> None:
    """Write an attempt's steps; what an earlier try of the attempt left there gives way."""
    if files.steps is not None:
        store.put(files.steps_name, files.steps)


def _put_data(store: Store, files: _Files) -> bool:
    """Create the final name. False: it stands, and its footer tells whose it is."""
    try:
        return store.put_if_absent(files.data_name, files.data)
    except OSError:
        if not store.exists(files.data_name):
            raise
        return False


def _settle(store: Store, plan: Plan, files: _Files) -> Commit:
    """Ask the standing file who won, and remove this attempt's steps if they can never count."""
    footer = read_footer(store, files.data_name)
    if plan.conditional_put and files.steps_name not in footer.steps:
        store.remove(files.steps_name)
    return Commit(won=footer.attempt == files.attempt, attempt=footer.attempt)


def read_footer(output: Output, name: str) -> Footer:
    """What a committed data file says of itself.

    Raises:
        FileNotFoundError: there is no such file.
        OutputError: the file is not one that this package committed.
    """
    store = open_store(output)
    try:
        with store.open(name) as file:
            return footer_of(pq.read_metadata(file))
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise OutputError(f"{store.root}/{name} is not a unit of this job: {error!r}") from None


def footer_of(metadata: pq.FileMetaData) -> Footer:
    """What the metadata of a committed data file say of it.

    Raises:
        KeyError, ValueError: this package did not write them.
    """
    own = json.loads((metadata.metadata or {})[_FOOTER_KEY])
    return Footer(
        job_id=own["job_id"],
        unit=own["unit"],
        attempt=own["attempt"],
        steps=tuple(own["steps"]),
        recorded=own["recorded"],
        num_outputs=metadata.num_rows,
    )


def committed_footers(output: Output) -> Iterator[Footer]:
    """Yield the footer of each committed unit, in order of units."""
    store = open_store(output)
    for unit in sorted(committed_units(store)):
        yield read_footer(store, data_name(unit))


def remove_orphan_steps(
    output: Output, plan: Plan, *, live_invocations: Collection[int] = ()
) -> int:
    """Remove the steps files that can never count, and return how many.

    Does nothing before the job is complete, when an attempt may be about to name its file, nor
    where the last writer of a unit wins, when one may still do so. A file of an invocation that
    may be at work, like one that replaces units, stays.
    """
    store = open_store(output)
    if not plan.conditional_put:
        return 0
    try:
        footers = [read_footer(store, data_name(unit)) for unit in range(plan.num_units)]
    except FileNotFoundError:
        return 0
    named = {name for footer in footers for name in footer.steps}
    orphans = [name for name in store.names(STEPS) if name not in named]
    dead = [name for name in orphans if _invocation_of(name) not in live_invocations]
    for name in dead:
        store.remove(name)
    return len(dead)


def _invocation_of(steps: str) -> int | None:
    attempt = attempt_of(steps)
    return None if attempt is None else attempt // ATTEMPTS_PER_INVOCATION


def _parquet(table: pa.Table, footer: dict[str, object] | None = None) -> memoryview:
    if footer is not None:
        kept = table.schema.metadata or {}
        table = table.replace_schema_metadata({**kept, _FOOTER_KEY: json.dumps(footer)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return memoryview(sink.getvalue())


def _package_version() -> str:
    try:
        return version("bastion_batch")
    except PackageNotFoundError:
        return "source tree"
