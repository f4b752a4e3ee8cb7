"""Taps of context tokens that no draft pass has needed yet.

While rows decode plainly their taps are only put by: one copy a step, into a buffer with a fixed
number of places per row, so that its memory is counted and a late draft finds them all. A row's
places are a ring: when they are full the oldest tokens are taken out, and those of a row that ends
without another draft are never worked on.

Shape letters: S tokens, F features of a token (T taps of E values each).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.buckets import Bucket
from bastion_batch.engine.transfer import to_device

PLACES_PER_ROW = 256
"""Tokens of a row that wait at most. Where drafting does not pay a short answer never needs them; they
take about the memory of 70 tokens of context."""


class Backlog(NamedTuple):
    """What was put by for some rows, row after row, oldest first."""

    counts: list[int]
    features_SF: Tensor
    """Padded with copies of the last."""


class _Ring:
    """The places of one row, from `first` on."""

    __slots__ = ("count", "first", "oldest")

    def __init__(self, first: int) -> None:
        self.first = first
        self.oldest = 0
        self.count = 0

    def add(self, count: int) -> Iterator[int]:
        """The places of so many more tokens."""
        start = self.oldest + self.count
        self.count += count
        assert self.count <= PLACES_PER_ROW, "a backlog is projected before it overflows"
        return self._places(start, count)

    def take(self, count: int) -> Iterator[int]:
        """The places of the oldest tokens, which are free from the next `add` on."""
        start = self.oldest
        self.oldest = (start + count) % PLACES_PER_ROW
        self.count -= count
        assert self.count >= 0, "no more is taken than was put by"
        return self._places(start, count)

    def _places(self, start: int, count: int) -> Iterator[int]:
        return (self.first + n % PLACES_PER_ROW for n in range(start, start + count))


class PendingTaps:
    """Tokens put by, `PLACES_PER_ROW` per row at most.

    Args:
        num_features: F.
        dtype: of the features.
        device: where they live.
    """

    def __init__(self, num_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, num_features, dtype=dtype, device=device)
        self._rings: dict[int, _Ring] = {}
        self._free: list[int] = []

    @property
    def bytes_per_row(self) -> int:
        """Memory of one row's places."""
        return PLACES_PER_ROW * self._buffer.shape[1] * self._buffer.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Memory of all places, free ones included."""
        return self._buffer.numel() * self._buffer.dtype.itemsize

    def num_tokens(self, key: int) -> int:
        """Tokens put by for a row."""
        ring = self._rings.get(key)
        return ring.count if ring else 0

    def has_room(self, key: int, num_tokens: int) -> bool:
        """Whether so many more tokens of a row can be put by."""
        return self.num_tokens(key) + num_tokens <= PLACES_PER_ROW

    def put(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Put tokens by, after those of the same rows; requires room for them."""
        places: list[int] = []
        for key, count in zip(keys, counts, strict=True):
            places.extend(self._ring(key).add(count))
        self._buffer.index_copy_(0, self._index(places), features_SF)

    def take(self, counts: Mapping[int, int], bucket: Bucket) -> Backlog:
        """Take out so many of the oldest tokens of some rows, padded to the bucket's size.

        At least one in all.
        """
        places: list[int] = []
        for key, count in counts.items():
            if count:
                places.extend(self._rings[key].take(count))
        places += places[-1:] * (bucket(len(places)) - len(places))
        return Backlog(list(counts.values()), self._buffer.index_select(0, self._index(places)))

    def drop(self, key: int) -> None:
        """Forget a row and give its places back."""
        ring = self._rings.pop(key, None)
        if ring is not None:
            self._free.append(ring.first)

    def _ring(self, key: int) -> _Ring:
        ring = self._rings.get(key)
        if ring is None:
            if not self._free:
                self._grow()
            ring = self._rings[key] = _Ring(self._free.pop())
        return ring

    def _grow(self) -> None:
        """Double the rows that fit."""
        size, num_features = self._buffer.shape
        grown = self._buffer.new_empty(max(PLACES_PER_ROW, 2 * size), num_features)
        grown[:size] = self._buffer
        self._free.extend(range(size, len(grown), PLACES_PER_ROW))
        self._buffer = grown

    def _index(self, places: list[int]) -> Tensor:
        return to_device(np.array(places, np.int64), self._buffer.device)


def in_batches(counts: Mapping[int, int], num_tokens: int) -> Iterator[dict[int, int]]:
    """The rows with any tokens, in batches of at most so many tokens; one row may have more."""
    batch: dict[int, int] = {}
    total = 0
    for key, count in counts.items():
        if batch and total + count > num_tokens:
            yield batch
            batch, total = {}, 0
        if count:
            batch[key] = count
            total += count
    if batch:
        yield batch
