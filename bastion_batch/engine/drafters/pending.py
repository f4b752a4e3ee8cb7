"""Taps of context tokens that no draft pass has needed yet.

While rows decode plainly their taps are only put by: one copy a step, into a buffer with a fixed
number of places per row, so that its memory is counted and a late draft finds them all.

Shape letters: S tokens, F features of a token (T taps of E values each).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.buckets import Bucket
from bastion_batch.engine.transfer import to_device

PLACES_PER_ROW = 64
"""Tokens of a row that wait at most. Projecting so many at once costs little more per token than
projecting a thousand."""


class Backlog(NamedTuple):
    """What was put by for some rows, row after row, oldest first."""

    counts: list[int]
    features_SF: Tensor
    """Padded with copies of the last."""


class PendingTaps:
    """Tokens put by, `PLACES_PER_ROW` per row at most.

    Args:
        num_features: F.
        dtype: of the features.
        device: where they live.
    """

    def __init__(self, num_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, num_features, dtype=dtype, device=device)
        self._first_places: dict[int, int] = {}
        self._counts: dict[int, int] = {}
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
        return self._counts.get(key, 0)

    def has_room(self, key: int, num_tokens: int) -> bool:
        """Whether so many more tokens of a row can be put by."""
        return self.num_tokens(key) + num_tokens <= PLACES_PER_ROW

    def is_half_full(self, key: int) -> bool:
        """Whether half of a row's places are taken."""
        return 2 * self.num_tokens(key) >= PLACES_PER_ROW

    def put(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Put tokens by, after those of the same rows; requires room for them."""
        places: list[int] = []
        for key, count in zip(keys, counts, strict=True):
            taken = self._counts.get(key, 0)
            assert taken + count <= PLACES_PER_ROW, "a backlog is projected before it overflows"
            first = self._place_of(key) + taken
            places.extend(range(first, first + count))
            self._counts[key] = taken + count
        self._buffer.index_copy_(0, self._index(places), features_SF)

    def in_batches(self, keys: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        """The rows that have tokens put by, in batches of about so many tokens."""
        batch: list[int] = []
        total = 0
        for key in keys:
            count = self.num_tokens(key)
            if batch and total + count > num_tokens:
                yield batch
                batch, total = [], 0
            if count:
                batch.append(key)
                total += count
        if batch:
            yield batch

    def take(self, keys: Sequence[int], bucket: Bucket) -> Backlog:
        """Take out all tokens of some rows, padded to the bucket's size."""
        counts = [self._counts.pop(key, 0) for key in keys]
        places: list[int] = []
        for key, count in zip(keys, counts, strict=True):
            if count:
                first = self._first_places[key]
                places.extend(range(first, first + count))
        places += places[-1:] * (bucket(len(places)) - len(places))
        return Backlog(counts, self._buffer.index_select(0, self._index(places)))

    def drop(self, key: int) -> None:
        """Forget a row and give its places back."""
        self._counts.pop(key, None)
        first = self._first_places.pop(key, None)
        if first is not None:
            self._free.append(first)

    def _place_of(self, key: int) -> int:
        first = self._first_places.get(key)
        if first is None:
            if not self._free:
                self._grow()
            first = self._first_places[key] = self._free.pop()
        return first

    def _grow(self) -> None:
        """Double the rows that fit."""
        size, num_features = self._buffer.shape
        grown = self._buffer.new_empty(max(PLACES_PER_ROW, 2 * size), num_features)
        grown[:size] = self._buffer
        self._free.extend(range(size, len(grown), PLACES_PER_ROW))
        self._buffer = grown

    def _index(self, places: list[int]) -> Tensor:
        return to_device(np.array(places, np.int64), self._buffer.device)
