"""The checks of one unit's file: against the plan, the source rows, and the steps it names."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import Footer, footer_of
from bastion_batch.io.plan import Plan
from bastion_batch.io.reader import UnitRows
from bastion_batch.io.results import COUNTED, Totals, id_problems
from bastion_batch.io.sinks import records_steps
from bastion_batch.io.store import Store
from bastion_batch.io.units import Unit
from bastion_batch.records import FinishReason

_NUM_SHOWN = 3
_OUTCOME = ("finish_reason", "output", "error", "error_kind", "num_output_tokens")

_Key = tuple[str, int]


class FoundUnit(NamedTuple):
    """A unit's file as it was read."""

    version: str | None
    """Of the store, from before it was read."""
    footer: Footer
    schema: pa.Schema
    table: pa.Table | None
    """None where only the footer was read."""

    @property
    def totals(self) -> Totals | None:
        """Counts of its rows, if they were read and have the columns."""
        countable = self.table is not None and set(COUNTED) <= set(self.table.column_names)
        return Totals.of_unit(self.table) if countable else None


def read_unit(store: Store, name: str) -> FoundUnit:
    """A unit's file, whole.

    Raises:
        OutputError: it is not one.
    """
    version = store.version(name)
    payload = store.read(name)
    with _as_damage(), pq.ParquetFile(pa.BufferReader(payload)) as file:
        return FoundUnit(version, footer_of(file.metadata), file.schema_arrow, file.read())


def read_unit_footer(store: Store, name: str) -> FoundUnit:
    """A unit's footer.

    Raises:
        OutputError: the file is not a unit's.
    """
    version = store.version(name)
    with store.open(name) as opened, _as_damage(), pq.ParquetFile(opened) as file:
        return FoundUnit(version, footer_of(file.metadata), file.schema_arrow, None)


def check_unit(
    store: Store, plan: Plan, unit: Unit, found: FoundUnit, source: UnitRows | None
) -> list[str]:
    """What is wrong with a unit: of its footer, and of its rows if they were read.

    `source` are the unit's rows in the input; None leaves their comparison out.
    """
    problems = list(_footer_problems(plan, unit, found))
    missing = [name for name in found.footer.steps if not store.exists(name)]
    problems += [f"names {name}, which is missing" for name in missing]
    if found.table is None or not found.schema.equals(plan.data_schema):
        return problems
    if found.table["row_id"].null_count or found.table["sample_index"].null_count:
        return [*problems, "has rows without a row_id or sample_index"]
    keys = _keys(found.table)
    problems += id_problems(plan, unit, keys)
    problems += _value_problems(found.table)
    if source is not None:
        problems += _source_problems(plan, found.table, keys, source)
    if not missing:
        problems += _steps_problems(store, plan, found.footer, found.table)
    return list(dict.fromkeys(problems))


def column_digest(column: pa.ChunkedArray) -> bytes:
    """A digest of a column's values, the same for the same values however they lie in memory.

    Of the column in Parquet's plain encoding, which has no place for what lies under a null.
    """
    sink = pa.BufferOutputStream()
    table = pa.table({"": column.combine_chunks()})
    pq.write_table(
        table,
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    return blake2b(sink.getvalue(), digest_size=16).digest()


@contextmanager
def _as_damage() -> Generator[None]:
    """Tell a file that is not what it should be from a storage that fails: an error with a number.

    Arrow raises an `OSError` without one for pages that cannot be decoded.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise OutputError(f"is not a unit of a job: {error!r}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise OutputError(f"cannot be decoded: {error}") from None


def _footer_problems(plan: Plan, unit: Unit, found: FoundUnit) -> Iterator[str]:
    footer = found.footer
    if footer.job_id != plan.job_id:
        yield f"is of job {footer.job_id}, not {plan.job_id}"
    if footer.unit != unit.unit:
        yield f"is unit {footer.unit}, not {unit.unit}"
    if footer.num_outputs != unit.num_rows * plan.samples_per_row:
        yield f"has {footer.num_outputs} rows, not {unit.num_rows} x {plan.samples_per_row}"
    if not found.schema.equals(plan.data_schema):
        planned, there = (
            [f"{f.name}: {f.type}" for f in s] for s in (plan.data_schema, found.schema)
        )
        lacks = [column for column in planned if column not in there]
        adds = [column for column in there if column not in planned]
        detail = f"lacks {lacks}, has {adds}" if lacks or adds else "in another order"
        yield f"has other columns than planned: {detail}"


def _value_problems(table: pa.Table) -> Iterator[str]:
    columns = [table[name].to_pylist() for name in _OUTCOME]
    ids = table["row_id"].to_pylist()
    wrong = [
        i
        for i, outcome in zip(ids, zip(*columns, strict=True), strict=True)
        if not _makes_sense(*outcome)
    ]
    if wrong:
        yield f"has {len(wrong)} rows whose outcome contradicts itself: {_few(wrong)}"


def _makes_sense(
    reason: str | None, output: str | None, error: str | None, kind: str | None, tokens: int | None
) -> bool:
    """An error row has an error and no output, any other an output and no error."""
    if reason == "error":
        return output is None and error is not None and kind is not None and tokens == 0
    answered = output is not None and error is None and kind is None and tokens is not None
    return answered and reason in get_args(FinishReason)


def _source_problems(
    plan: Plan, table: pa.Table, keys: list[_Key], source: UnitRows
) -> Iterator[str]:
    """Rows and input columns are those of the input, each row repeated for its samples."""
    samples = range(plan.samples_per_row)
    expected = [(row_id, sample) for row_id in source.row_ids for sample in samples]
    if keys != expected:
        lacking = _few(expected, keys)
        if lacking:
            yield f"lacks rows of the input: {lacking}"
        return
    rows = source.table.select(list(plan.carried))
    if plan.samples_per_row > 1:
        rows = rows.take(pa.array([i for i in range(rows.num_rows) for _ in samples], pa.int64()))
    for position, name in enumerate(plan.data_schema.names[: len(plan.carried)]):
        if column_digest(table.column(position)) != column_digest(rows.column(position)):
            yield f"column {name!r} differs from the input's"


def _steps_problems(store: Store, plan: Plan, footer: Footer, table: pa.Table) -> Iterator[str]:
    """The steps are of the unit's rows, of all that were to be recorded, and make up their tokens."""
    committed: Counter[_Key] = Counter()
    for name in footer.steps:
        try:
            with _as_damage(), pq.ParquetFile(pa.BufferReader(store.read(name))) as file:
                steps = file.read()
        except OutputError as error:
            yield f"names {name}, which {error}"
            return
        if not steps.schema.equals(plan.steps_schema):
            yield f"names {name}, which has other columns than planned"
            return
        for key, num_tokens in zip(_keys(steps), steps["num_committed"].to_pylist(), strict=True):
            committed[key] += num_tokens or 0
    tokens = dict(zip(_keys(table), table["num_output_tokens"].to_pylist(), strict=True))
    foreign = [row_id for row_id, sample in committed if (row_id, sample) not in tokens]
    if foreign:
        yield f"has steps of rows that are not its own: {_few(foreign)}"
    wrong = [
        key[0]
        for key, num_tokens in tokens.items()
        if (key in committed or records_steps(footer.recorded, key[0]))
        and committed[key] != num_tokens
    ]
    if wrong:
        yield f"has {len(wrong)} rows whose steps do not add up to their tokens: {_few(wrong)}"


def _keys(table: pa.Table) -> list[_Key]:
    ids, samples = table["row_id"].to_pylist(), table["sample_index"].to_pylist()
    return list(zip(ids, samples, strict=True))


def _few(items: Iterable[object], but: Iterable[object] = ()) -> str:
    """The first few, leaving some out."""
    left_out = set(but)
    shown = [str(item) for item in items if item not in left_out]
    more = ", ..." if len(shown) > _NUM_SHOWN else ""
    return ", ".join(shown[:_NUM_SHOWN]) + more
