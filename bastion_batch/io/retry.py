"""Failed rows of a complete output, decoded again: which units they are in, and how one changes.

A unit is replaced whole, and only while its file is the one that was chosen: rows that had an
answer keep it, with their steps, and the others get what came of them now. So a unit is done when
its file is no longer the chosen one, whoever replaced it, and a second try of it changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import (
    Commit,
    committed_units,
    data_name,
    read_footer,
    replace_unit,
)
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.plan import Plan
from bastion_batch.io.results import in_threads
from bastion_batch.io.store import Output, Store, open_store
from bastion_batch.records import RowKey


class Chosen(NamedTuple):
    """A unit with rows to decode again."""

    version: str
    """Of its file, from before it was read."""
    num_outputs: int
    """Rows to decode again."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The rows of one `retry-failed`. Small: it travels to every worker."""

    units: Mapping[int, Chosen]
    kinds: frozenset[str]
    """Error kinds to decode again; empty: all."""

    @property
    def num_outputs(self) -> int:
        """Rows to decode again."""
        return sum(unit.num_outputs for unit in self.units.values())

    def done(self, output: Output, plan: Plan) -> set[int]:
        """The units that need nothing: not chosen, or replaced by now."""
        store = open_store(output)
        units = list(self.units)
        versions = in_threads(lambda unit: store.version(data_name(unit)), units)
        pending = {
            unit
            for unit, version in zip(units, versions, strict=True)
            if version == self.units[unit].version
        }
        return set(range(plan.num_units)) - pending

    def open(self, output: Output, plan: Plan, unit: int) -> "RetriedUnit":
        """Read a chosen unit as it stands.

        Raises:
            OutputError: its file cannot be read.
        """
        store = open_store(output)
        name = data_name(unit)
        footer = read_footer(store, name)
        table = _read(store, name)
        again = frozenset(
            key
            for key, kind in zip(_keys(table), table["error_kind"].to_pylist(), strict=True)
            if kind is not None and (not self.kinds or kind in self.kinds)
        )
        steps = [_read(store, steps) for steps in footer.steps]
        as_recorded = replace(plan, steps=footer.recorded)
        return RetriedUnit(unit, as_recorded, self.units[unit].version, again, table, steps)


class RetriedUnit(NamedTuple):
    """A unit whose failed rows are decoded again."""

    unit: int
    plan: Plan
    """With steps recorded as the unit recorded them."""
    version: str
    again: frozenset[RowKey]
    """What is decoded again."""
    table: pa.Table
    steps: list[pa.Table]

    def replace(
        self,
        output: Output,
        attempt: int,
        data: pa.Table,
        steps: pa.Table | None,
        *,
        before_data: Callable[[], None] | None = None,
    ) -> Commit:
        """Replace the unit by its kept rows and these, which are the ones decoded again.

        `before_data` is called between the steps file and the data file.

        Raises:
            OSError: as `replace_unit`.
        """
        return replace_unit(
            output,
            self.plan,
            self.unit,
            attempt,
            _merged(self.table, data),
            _merged_steps(self.steps, steps),
            replaced=self.version,
            before_data=before_data,
        )


def choose(output: Output, plan: Plan, kinds: frozenset[str] = frozenset()) -> Retry:
    """Find the failed rows of an output.

    Raises:
        OutputError: the output is not complete.
    """
    store = open_store(output)
    missing = plan.num_units - len(committed_units(store).intersection(range(plan.num_units)))
    if missing:
        raise OutputError(
            f"output {store.root} lacks {missing} of {plan.num_units} units: run the job to its "
            "end first"
        )

    def look(unit: int) -> Chosen:
        version = store.version(data_name(unit))
        assert version is not None, f"unit {unit} is committed"
        found = _read(store, data_name(unit), ["error_kind"])["error_kind"].to_pylist()
        again = [kind for kind in found if kind is not None and (not kinds or kind in kinds)]
        return Chosen(version, len(again))

    looked = enumerate(in_threads(look, range(plan.num_units)))
    return Retry({unit: chosen for unit, chosen in looked if chosen.num_outputs}, kinds)


def _merged(table: pa.Table, new: pa.Table) -> pa.Table:
    """The table with the rows of `new` in the places of those with the same ids."""
    replacement = {key: table.num_rows + i for i, key in enumerate(_keys(new))}
    indices = [replacement.get(key, i) for i, key in enumerate(_keys(table))]
    both = pa.concat_tables(
        [table.replace_schema_metadata(None), new.replace_schema_metadata(None)]
    )
    return both.take(pa.array(indices, pa.int64())).replace_schema_metadata(new.schema.metadata)


def _merged_steps(kept: list[pa.Table], new: pa.Table | None) -> pa.Table | None:
    """All steps, by row; those of one row stay in order. Failed rows had none."""
    tables = [*kept, *([] if new is None else [new])]
    if not tables:
        return None
    return pa.concat_tables(tables).sort_by(
        [("row_id", "ascending"), ("sample_index", "ascending")]
    )


def _read(store: Store, name: str, columns: list[str] | None = None) -> pa.Table:
    try:
        with store.open(name) as file:
            return read_parquet(file, columns)
    except (FileNotFoundError, pa.ArrowException) as error:
        raise OutputError(f"{store.root}/{name} cannot be read: {error!r}; see `verify`") from None


def _keys(table: pa.Table) -> list[RowKey]:
    ids, samples = table["row_id"].to_pylist(), table["sample_index"].to_pylist()
    return list(zip(ids, samples, strict=True))
