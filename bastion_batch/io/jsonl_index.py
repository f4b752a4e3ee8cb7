"""Where the lines of a JSONL file are, and which of them are of one make.

Two lines have the same shape when they differ only in space, in the content of strings that are
not keys, and in the digits of numbers of one kind. What one valid line of a shape says of types,
every valid line of that shape says, so that planning parses one of each. Validity is not looked
at: it is not part of a shape, and is found when the line is read.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.compiled import compiled
from bastion_batch.io.jsonl import Line

BLOCK_BYTES = 8 << 20
_EXACT_DIGITS = 15
"""Integers of so many digits are exact in a double, whichever they are."""

_LINE_FEED, _QUOTE, _BACKSLASH, _COLON, _SPACE, _TAB, _CARRIAGE_RETURN = b'\n"\\: \t\r'
_ZERO, _NINE, _MINUS, _PLUS, _POINT, _SMALL_E, _LARGE_E = b"09-+.eE"
_SEED, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_TEXT, _INTEGER, _LARGE_INTEGER, _FLOAT = map(np.uint64, range(256, 260))
"""What stands in a shape for a value: no byte does."""


class Lines(NamedTuple):
    """Consecutive lines of a file that are not blank."""

    block: bytes
    starts: NDArray[np.int64]
    """Where each line begins in the block."""
    ends: NDArray[np.int64]
    """Where each line ends: behind its line feed."""
    numbers: NDArray[np.int64]
    """The physical line in the file, from 0."""
    shapes: NDArray[np.uint64]
    """A hash of each line's shape."""
    is_singular: NDArray[np.bool_]
    """Lines with an integer so large that its shape does not tell its type."""
    offset: int
    """Of the block in the file."""

    def line(self, index: int) -> Line:
        """One of the lines."""
        start = int(self.starts[index])
        raw = self.block[start : int(self.ends[index])]
        if self.offset + start == 0:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        return Line(int(self.numbers[index]), self.offset + start, raw)


def index_lines(file: BinaryIO, block_bytes: int = BLOCK_BYTES) -> Iterator[Lines]:
    """Yield the lines of a file, read from its start in blocks of whole lines.

    A byte order mark is no part of the first line, which still begins at byte 0.
    """
    offset, number = 0, 0
    for block in _blocks(file, block_bytes):
        skipped = len(codecs.BOM_UTF8) if offset == 0 and block[:3] == codecs.BOM_UTF8 else 0
        num_lines = block.count(b"\n") + 1
        starts, ends, numbers = np.empty((3, num_lines), np.int64)
        shapes = np.empty(num_lines, np.uint64)
        is_singular = np.empty(num_lines, np.bool_)
        found, passed = _index(
            np.frombuffer(block, np.uint8), skipped, starts, ends, numbers, shapes, is_singular
        )
        yield Lines(
            block,
            starts[:found],
            ends[:found],
            numbers[:found] + number,
            shapes[:found],
            is_singular[:found],
            offset,
        )
        offset += len(block)
        number += passed


def _blocks(file: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """The file in pieces that end with a line feed, the last one perhaps not."""
    rest: list[bytes] = []
    while block := file.read(block_bytes):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, block[:end]])
            rest = []
        rest.append(block[end:])
    if last := b"".join(rest):
        yield last


@compiled()
def _index(
    block: NDArray[np.uint8],
    i: int,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
    shapes: NDArray[np.uint64],
    is_singular: NDArray[np.bool_],
) -> tuple[int, int]:
    """Fill in the lines that are not blank from byte `i`, and count these and all."""
    size, found, number, start = len(block), 0, 0, 0
    shape, blank, singular = _SEED, True, False
    while i <= size:
        if i == size or block[i] == _LINE_FEED:
            i = min(i + 1, size)
            if not blank:
                starts[found], ends[found], numbers[found] = start, i, number
                shapes[found], is_singular[found] = shape, singular
                found += 1
            if start == size:
                break
            number, start = number + 1, i
            shape, blank, singular = _SEED, True, False
            continue
        code = np.uint64(block[i])
        if code == _SPACE or _TAB <= code <= _CARRIAGE_RETURN:
            i += 1
            continue
        if code == _QUOTE:
            code, i = _text(block, i + 1)
        elif code == _MINUS or _ZERO <= code <= _NINE:
            code, i = _number(block, i)
            singular = singular or code == _LARGE_INTEGER
        else:
            i += 1
        shape, blank = (shape ^ code) * _PRIME, False
    return found, number


@compiled()
def _text(block: NDArray[np.uint8], i: int) -> tuple[np.uint64, int]:
    """What stands for the string whose first byte is `i`, and where it ends: a key is itself."""
    size, text = len(block), _SEED
    while i < size and block[i] != _LINE_FEED and block[i] != _QUOTE:
        if block[i] == _BACKSLASH and i + 1 < size and block[i + 1] != _LINE_FEED:
            text = (text ^ np.uint64(block[i])) * _PRIME
            i += 1
        text = (text ^ np.uint64(block[i])) * _PRIME
        i += 1
    if i < size and block[i] == _QUOTE:
        i += 1
    while i < size and (block[i] == _SPACE or block[i] == _TAB or block[i] == _CARRIAGE_RETURN):
        i += 1
    return (text if i < size and block[i] == _COLON else _TEXT), i


@compiled()
def _number(block: NDArray[np.uint8], i: int) -> tuple[np.uint64, int]:
    """What stands for the number whose first byte is `i`, and where it ends."""
    num_digits, is_float = 0, False
    while i < len(block):
        byte = block[i]
        if _ZERO <= byte <= _NINE:
            num_digits += 1
        elif byte == _POINT or byte == _SMALL_E or byte == _LARGE_E or byte == _PLUS:  # noqa: SIM109 - bytes are compared, no tuple is made
            is_float = True
        elif byte != _MINUS:
            break
        i += 1
    if is_float:
        return _FLOAT, i
    return (_INTEGER if num_digits <= _EXACT_DIGITS else _LARGE_INTEGER), i
