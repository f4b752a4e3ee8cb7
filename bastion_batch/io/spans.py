"""Spans: what one worker streams once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bastion_batch.io.jsonl_index import Lines

MAX_SPAN_BYTES = 64 << 20
"""Most bytes of a text file that one worker streams as one span."""


class Span(NamedTuple):
    """A row group or a stretch of a text file."""

    file: int
    span: int
    rows: Sequence[int] | NDArray[np.int64]
    """Number in the file of each row: the physical line's in text."""
    offsets: Sequence[int] | NDArray[np.int64]
    """Byte of each line, or place of each row in its row group."""


class _Piece(NamedTuple):
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]


class TextSpans:
    """Collects the lines of one text file, a new span at each `MAX_SPAN_BYTES`."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._spans: list[list[_Piece]] = []
        self._end = 0

    def add(self, lines: "Lines") -> None:
        """Take the next lines of the file."""
        rest = _Piece(lines.numbers, lines.starts + lines.offset)
        ends = lines.ends + lines.offset
        while len(ends):
            fitting = int(np.searchsorted(ends, self._end, side="right"))
            if fitting:
                self._spans[-1].append(_Piece(rest.rows[:fitting], rest.offsets[:fitting]))
                rest, ends = _Piece(rest.rows[fitting:], rest.offsets[fitting:]), ends[fitting:]
            else:
                self._spans.append([])
                self._end = max(int(rest.offsets[0]) + MAX_SPAN_BYTES, int(ends[0]))

    def spans(self) -> list[Span]:
        """The spans of the whole file."""
        return [
            Span(
                self._file,
                number,
                _compact(np.concatenate([piece.rows for piece in pieces])),
                np.concatenate([piece.offsets for piece in pieces]),
            )
            for number, pieces in enumerate(self._spans)
        ]


def _compact(rows: NDArray[np.int64]) -> Sequence[int] | NDArray[np.int64]:
    """A range, where no line between the rows is blank."""
    first, last = int(rows[0]), int(rows[-1])
    return range(first, last + 1) if last - first + 1 == len(rows) else rows
