import io
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bastion_batch.io.jsonl import (
    JSON_TEXT,
    MAX_NESTING,
    MAX_STRUCT_FIELDS,
    Line,
    Shape,
    iter_lines,
    parse_line,
    replace_surrogates,
    schema_of,
    to_table,
)

TEXT = pa.large_string()
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def parse(text: str | bytes):
    raw = text.encode() if isinstance(text, str) else text
    return parse_line(Line(4, 0, raw))


def schema(rows, prompt=None):
    columns: dict[str, Shape] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, Shape()).observe(value)
    return schema_of(columns, prompt)


def type_of(*column_values):
    field = schema([{"c": value} for value in column_values]).field("c")
    return "json" if field.metadata == JSON_TEXT else field.type


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([None, None], TEXT),
        ([1, None, -(2**63)], pa.int64()),
        ([2**63], "json"),
        ([1, 2.5], pa.float64()),
        ([2**53 + 1, 2.5], "json"),
        ([True, None], pa.bool_()),
        ([True, 1], "json"),
        (["a", 1], "json"),
        (["2024-01-01T00:00:00"], TEXT),
        ([[], [None]], pa.list_(TEXT)),
        ([[1], [2.5]], pa.list_(pa.float64())),
        ([[1], ["a"]], "json"),
        ([{"a": 1}, {"b": [True]}], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.bool_()))])),
        ([{"a": 1}, {"a": "x"}], "json"),
        ([{}], "json"),
        ([[{}]], "json"),
        ([[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]], "json"),
        ([{f"k{i}": 1} for i in range(MAX_STRUCT_FIELDS + 1)], "json"),
    ],
)
def test_a_column_has_the_one_type_that_fits(column, expected):
    assert type_of(*column) == expected
    assert type_of(*reversed(column)) == expected or isinstance(expected, pa.StructType)


def without_absent(value):
    """Absent keys and nulls are the same in a struct."""
    if isinstance(value, dict):
        return {k: without_absent(v) for k, v in value.items() if v is not None}
    return [without_absent(v) for v in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), values), min_size=1, max_size=6))
def test_columns_hold_every_value_unchanged_through_parquet(rows):
    rows = [parse(json.dumps({"id": 1, **row})).values for row in rows]
    sink = io.BytesIO()
    pq.write_table(to_table(rows, schema(rows)), sink)
    table = pq.read_table(sink)
    assert table.schema == schema(rows)
    for row, got in zip(rows, table.to_pylist(), strict=True):
        for field in table.schema:
            value, kept = row.get(field.name), got[field.name]
            if field.metadata == JSON_TEXT:
                kept = None if kept is None else json.loads(kept)
            assert without_absent(kept) == without_absent(value)


def test_nan_and_infinity_are_numbers():
    rows = [parse('{"x": NaN}').values, parse('{"x": -Infinity}').values]
    nan, infinity = to_table(rows, schema(rows))["x"].to_pylist()
    assert math.isnan(nan)
    assert infinity == -math.inf


@pytest.mark.parametrize(
    ("raw", "kind", "says"),
    [
        (b'{"prompt": "\xff"}', "invalid_utf8", "line 5 is not UTF-8 at byte 13"),
        (b'{"prompt": "secret', "invalid_json", "line 5 is not JSON at character 12"),
        (b'["secret"]', "invalid_json", "holds a JSON list, not an object"),
        (b"null", "invalid_json", "holds a JSON null"),
        (b'{"x": ' + b"9" * 5000 + b"}", "invalid_json", "too many digits"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "over 100 levels"),
        (b'{"x": ' + b"[" * 120 + b"]" * 120 + b"}", "invalid_json", "over 100 levels"),
    ],
)
def test_a_bad_line_is_a_row_with_a_fault(raw, kind, says):
    row = parse(raw)
    assert row.values == {}
    assert row.fault is not None
    assert row.fault.kind == kind
    assert says in row.fault.message
    assert "secret" not in row.fault.message


def test_the_deepest_line_that_parses_can_be_kept_as_text():
    depth = MAX_NESTING - 1
    rows = [parse('{"x": ' + "[" * depth + "]" * depth + "}").values]
    assert to_table(rows, schema(rows))["x"].to_pylist() == ["[" * depth + "]" * depth]


@settings(deadline=None)
@given(st.binary())
def test_no_line_is_too_bad_to_be_a_row(raw):
    row = parse(raw)
    assert (row.fault is None) or row.values == {}
    to_table([row.values], schema([row.values]))


def test_lone_surrogates_are_replaced_and_counted():
    row = parse(r'{"a": "x\ud800y", "b": ["\uDC00", "\ud83d\ude00"], "\ud801": 1}')
    assert row.values == {"a": "x\ufffdy", "b": ["\ufffd", "\U0001f600"], "\ufffd": 1}
    assert row.num_replaced == 3
    to_table([row.values], schema([row.values]))


@settings(deadline=None)
@given(st.text())
def test_only_surrogates_are_replaced(text):
    assert replace_surrogates(text) == text


def test_a_prompt_column_stays_text_beside_other_values():
    rows = [{"prompt": "hello"}, {"prompt": 5}, {"prompt": None}]
    table = to_table(rows, schema(rows, prompt="prompt"))
    assert table["prompt"].to_pylist() == ["hello", "5", None]


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"{}", b"", b"  ", b"\r", b"x\r"]), max_size=12), st.booleans())
def test_lines_are_found_again_from_any_one_of_them(lines, ends):
    content = b"\xef\xbb\xbf" + b"\n".join(lines) + (b"\n" if ends else b"")
    found = list(iter_lines(io.BytesIO(content)))
    assert [line.number for line in found] == [i for i, x in enumerate(lines) if x.strip()]
    for i, line in enumerate(found):
        again = iter_lines(io.BytesIO(content), number=line.number, offset=line.offset)
        assert list(again) == found[i:]
