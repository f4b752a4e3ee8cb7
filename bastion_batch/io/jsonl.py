"""JSONL: lines, the rows in them, the column types that hold them all, and Arrow columns.

A line ends at a line feed. A row is a line that is not blank; its number is the physical line's,
from 0. A line that holds no JSON object is still a row: every column null, and a `RowFault`.
Columns have the one type that fits all their values in all files; where none does (integers
beyond 64 bits, strings beside numbers), the column holds each value as JSON text.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from bastion_batch.records import RowFault

if TYPE_CHECKING:
    from bastion_batch.io.jsonl_index import Lines

TEXT_TYPE = pa.large_string()
JSON_TEXT = {b"bastion_batch.encoding": b"json"}
"""Metadata of a field that holds values as JSON text."""
MAX_NESTING = 100
"""Lists and objects inside each other, in one line."""
MAX_TYPED_NESTING = 16
"""A column nested deeper than this is kept as JSON text."""
MAX_STRUCT_FIELDS = 256
"""A column of objects with more keys than this is a dictionary: kept as JSON text."""

_MAX_KNOWN_SHAPES = 1 << 20
_EXACT_IN_DOUBLE = 1 << 53
_INT64 = range(-(1 << 63), 1 << 63)
_NAMES = {
    str: "string",
    float: "number",
    int: "number",
    bool: "boolean",
    list: "list",
    dict: "object",
    type(None): "null",
}


class Line(NamedTuple):
    """One line that is not blank."""

    number: int
    offset: int
    raw: bytes


class Parsed(NamedTuple):
    """A line's row: its values, or the fault that takes their place."""

    values: dict[str, Any]
    fault: RowFault | None
    num_replaced: int
    """Strings in which lone surrogates, which no UTF-8 can hold, were replaced."""


def iter_lines(file: BinaryIO, *, number: int = 0, offset: int = 0) -> Iterator[Line]:
    """Yield the lines from the one with this number, which begins at this byte."""
    file.seek(offset)
    for raw in file:
        content = raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw
        if content.strip():
            yield Line(number, offset, content)
        number += 1
        offset += len(raw)


def parse_line(line: Line) -> Parsed:
    """The row in a line. Never raises, and no message quotes the line."""
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return _fault("invalid_utf8", line, f"is not UTF-8 at byte {error.start + 1}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return _fault(
            "invalid_json", line, f"is not JSON at character {error.pos + 1}: {error.msg}"
        )
    except ValueError:
        return _fault("invalid_json", line, "holds a number of too many digits")
    except RecursionError:
        return _fault("invalid_json", line, f"is nested over {MAX_NESTING} levels deep")
    if not isinstance(value, dict):
        return _fault("invalid_json", line, f"holds a JSON {_NAMES[type(value)]}, not an object")
    if text.count("[") + text.count("{") > MAX_NESTING and _nesting_exceeds(value, MAX_NESTING):
        return _fault("invalid_json", line, f"is nested over {MAX_NESTING} levels deep")
    if "\\ud" not in text and "\\uD" not in text:
        return Parsed(value, None, 0)
    replaced: list[str] = []
    return Parsed(_without_surrogates(value, replaced), None, len(replaced))


def replace_surrogates(text: str) -> str:
    """The text with the replacement character for each lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True)
class Shape:
    """What a column, a list's items or an object's field were seen to hold. Order is irrelevant."""

    seen: set[str] = field(default_factory=set)
    items: "Shape | None" = None
    fields: "dict[str, Shape]" = field(default_factory=dict)

    def observe(self, value: Any, depth: int = 0) -> None:  # noqa: ANN401 - any JSON value
        """Add one value; null adds nothing."""
        if value is None:
            return
        kind = _kind(value)
        if kind in ("list", "object") and depth >= MAX_TYPED_NESTING:
            kind = "deep"
        self.seen.add(kind)
        if kind == "list":
            self.items = self.items or Shape()
            for item in value:
                self.items.observe(item, depth + 1)
        elif kind == "object":
            self._observe_fields(value, depth)

    def _observe_fields(self, value: dict[str, Any], depth: int) -> None:
        for name, item in value.items():
            if name not in self.fields:
                if len(self.fields) >= MAX_STRUCT_FIELDS:
                    self.seen.add("wide")
                    return
                self.fields[name] = Shape()
            self.fields[name].observe(item, depth + 1)

    def arrow_type(self) -> pa.DataType | None:
        """The type that holds every value seen unchanged, or None where there is none."""
        if self.seen == {"list"} and self.items:
            inner = self.items.arrow_type()
            return None if inner is None else pa.list_(inner)
        if self.seen == {"object"} and self.fields:
            inner = [(name, shape.arrow_type()) for name, shape in self.fields.items()]
            return None if any(t is None for _, t in inner) else pa.struct(inner)
        for kinds, scalar in _SCALARS:
            if self.seen <= kinds:
                return scalar
        return None


class ColumnTypes:
    """What the columns of all files were seen to hold; one valid line of each shape is parsed."""

    def __init__(self) -> None:
        self.columns: dict[str, Shape] = {}
        self._known: set[int] = set()

    def observe(self, lines: "Lines") -> None:
        """Add the lines of a block."""
        for i in self._unknown(lines):
            shape = int(lines.shapes[i])
            if shape in self._known and not lines.is_singular[i]:
                continue
            row = parse_line(lines.line(i))
            for name, value in row.values.items():
                self.columns.setdefault(name, Shape()).observe(value)
            if row.fault is None:
                self._known.add(shape)

    def _unknown(self, lines: "Lines") -> list[int]:
        """Lines that may tell something new, in order."""
        if len(self._known) > _MAX_KNOWN_SHAPES:
            self._known.clear()
        shapes, inverse = np.unique(lines.shapes, return_inverse=True)
        is_new = np.array([shape not in self._known for shape in shapes.tolist()], np.bool_)
        return np.flatnonzero(is_new[inverse] | lines.is_singular).tolist()


_SCALARS: tuple[tuple[set[str], pa.DataType], ...] = (
    ({"string"}, TEXT_TYPE),
    ({"boolean"}, pa.bool_()),
    ({"integer", "long"}, pa.int64()),
    ({"integer", "number"}, pa.float64()),
)


def schema_of(columns: dict[str, Shape], prompt: str | None) -> pa.Schema:
    """The schema that holds every row; a prompt column is text whatever else it holds."""
    fields = []
    for name, shape in columns.items():
        arrow_type = TEXT_TYPE if name == prompt else shape.arrow_type()
        if arrow_type is None:
            fields.append(pa.field(name, TEXT_TYPE, metadata=JSON_TEXT))
        else:
            fields.append(pa.field(name, arrow_type))
    return pa.schema(fields)


def to_table(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """The rows under a schema that `schema_of` made for them; missing keys are null."""
    return pa.Table.from_arrays(
        [_column([row.get(f.name) for row in rows], f) for f in schema], schema=schema
    )


def _column(values: list[Any], column: pa.Field) -> pa.Array:
    if column.metadata and column.metadata.items() >= JSON_TEXT.items():
        values = [None if v is None else json_text(v) for v in values]
    elif column.type == TEXT_TYPE:
        values = [v if v is None or isinstance(v, str) else json_text(v) for v in values]
    return pa.array(values, type=column.type)


def json_text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """The value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """The JSON name of a value's type; integers by what can hold them."""
    if type(value) is not int:
        return _NAMES[type(value)]
    if abs(value) <= _EXACT_IN_DOUBLE:
        return "integer"
    return "long" if value in _INT64 else "huge"


def _fault(kind: str, line: Line, problem: str) -> Parsed:
    return Parsed({}, RowFault(kind, f"line {line.number + 1} {problem}"), 0)


def _nesting_exceeds(value: Any, limit: int) -> bool:  # noqa: ANN401 - any JSON value
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True


def _without_surrogates(value: Any, replaced: list[str]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        clean = replace_surrogates(value)
        if clean != value:
            replaced.append(clean)
        return clean
    if isinstance(value, list):
        return [_without_surrogates(item, replaced) for item in value]
    if isinstance(value, dict):
        return {
            _without_surrogates(name, replaced): _without_surrogates(item, replaced)
            for name, item in value.items()
        }
    return value
