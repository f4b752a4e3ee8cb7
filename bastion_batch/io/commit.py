"""Committing units: a unit is done when its final name in `data/` exists.

    steps/u00000123-a7.parquet   first, under a name of this attempt's own
    data/u00000123.parquet       then, by put-if-absent; its footer names the steps files that count

Of several attempts at a unit exactly one creates the name. An attempt that finds the name taken
reads the footer: its own attempt there means that it won and the answer was lost; another's means
that it lost, and it removes its own steps file, nothing else.
"""

import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import OutputError
from bastion_batch.io.plan import Plan
from bastion_batch.io.store import (
    DATA,
    INVOCATIONS,
    STEPS,
    LocalStore,
    Output,
    open_store,
    prepare_output,
)

__all__ = [
    "Commit",
    "Footer",
    "claim_invocation",
    "commit_unit",
    "committed_footers",
    "committed_units",
    "prepare_output",
    "remove_orphan_steps",
]

_FOOTER_KEY = b"bastion_batch"
_UNIT_NAME = re.compile(rf"{DATA}/u(\d{{8,}})\.parquet")


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
    num_outputs: int


def data_name(unit: int) -> str:
    """The name whose existence means that the unit is done."""
    return f"{DATA}/u{unit:08d}.parquet"


def steps_name(unit: int, attempt: int) -> str:
    """The name of one attempt's steps file."""
    return f"{STEPS}/u{unit:08d}-a{attempt}.parquet"


def claim_invocation(output: Output) -> int:
    """The number of this invocation of the job: 1, 2, ..., never given twice."""
    store = open_store(output)
    nonce = uuid4().hex
    number = 1 + len(store.names(INVOCATIONS))
    while not _claim(store, number, nonce):
        number += 1
    return number


def _claim(store: LocalStore, number: int, nonce: str) -> bool:
    name = f"{INVOCATIONS}/{number:08d}.json"
    payload = json.dumps({"invocation": number, "nonce": nonce}).encode()
    return store.put_if_absent(name, payload) or store.read(name) == payload


def committed_units(output: Output) -> set[int]:
    """The units that are done, by listing `data/`."""
    matches = (_UNIT_NAME.fullmatch(name) for name in open_store(output).names(DATA))
    return {int(match[1]) for match in matches if match}


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
        OSError: storage failed and the unit is not committed.
    """
    store = open_store(output)
    if store.exists(data_name(unit)):
        return _settle(store, unit, attempt)
    named: tuple[str, ...] = ()
    if steps is not None and steps.num_rows:
        named = (steps_name(unit, attempt),)
        _put_steps(store, named[0], _parquet(steps))
    if before_data is not None:
        before_data()
    footer: dict[str, object] = {
        "job_id": plan.job_id,
        "unit": unit,
        "attempt": attempt,
        "steps": named,
        "bastion_batch": _package_version(),
    }
    return _put_data(store, unit, attempt, _parquet(data, footer))


def _put_steps(store: LocalStore, name: str, payload: memoryview) -> None:
    """Write an attempt's steps; what an earlier try of the attempt left there gives way."""
    if not store.put_if_absent(name, payload):
        store.remove(name)
        store.put_if_absent(name, payload)


def _put_data(store: LocalStore, unit: int, attempt: int, payload: memoryview) -> Commit:
    name = data_name(unit)
    try:
        if store.put_if_absent(name, payload):
            return Commit(won=True, attempt=attempt)
    except OSError:
        if not store.exists(name):
            raise
    return _settle(store, unit, attempt)


def _settle(store: LocalStore, unit: int, attempt: int) -> Commit:
    """Ask the standing file who won, and remove this attempt's steps if they do not count."""
    footer = read_footer(store, data_name(unit))
    own_steps = steps_name(unit, attempt)
    if own_steps not in footer.steps:
        store.remove(own_steps)
    return Commit(won=footer.attempt == attempt, attempt=footer.attempt)


def read_footer(output: Output, name: str) -> Footer:
    """What a committed data file says of itself.

    Raises:
        OutputError: the file is not one that this package committed.
    """
    store = open_store(output)
    try:
        with store.open(name) as file:
            metadata = pq.read_metadata(file)
        own = json.loads((metadata.metadata or {})[_FOOTER_KEY])
        return Footer(
            job_id=own["job_id"],
            unit=own["unit"],
            attempt=own["attempt"],
            steps=tuple(own["steps"]),
            num_outputs=metadata.num_rows,
        )
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise OutputError(f"{store.root}/{name} is not a unit of this job: {error!r}") from None


def committed_footers(output: Output) -> Iterator[Footer]:
    """Yield the footer of each committed unit, in order of units."""
    store = open_store(output)
    for unit in sorted(committed_units(store)):
        yield read_footer(store, data_name(unit))


def remove_orphan_steps(output: Output) -> int:
    """Remove the steps files that no committed unit names, and return how many.

    Only for a complete job: before that, an attempt may be about to name its file.
    """
    store = open_store(output)
    named = {name for footer in committed_footers(store) for name in footer.steps}
    orphans = [name for name in store.names(STEPS) if name not in named]
    for name in orphans:
        store.remove(name)
    return len(orphans)


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
