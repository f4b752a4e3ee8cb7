"""What a row has said so far, counted once per committed token."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenCounts(NamedTuple):
    """Distinct tokens of a prompt and an output."""

    ids: NDArray[np.int64]
    times: NDArray[np.int64]
    """How often the output holds each; 0 for what only the prompt holds."""


class History:
    """The tokens of one row, for the penalties.

    Args:
        prompt_ids: the row's prompt.
        output_ids: what followed it. It may grow, but not change, once it has been counted.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids
        self._num_counted = 0
        self._place_of: dict[int, int] = {}
        self._times: list[int] = []
        self._committed: TokenCounts | None = None

    def counts(self, path_ids: Sequence[int] = ()) -> TokenCounts:
        """The counts after a path of nodes below the output."""
        committed = self._count_committed()
        if not path_ids:
            return committed
        path = Counter(path_ids)
        new = [token for token in path if token not in self._place_of]
        times = np.append(committed.times, [path[token] for token in new]).astype(np.int64)
        for token in path.keys() - set(new):
            times[self._place_of[token]] += path[token]
        return TokenCounts(np.append(committed.ids, new).astype(np.int64), times)

    def _count_committed(self) -> TokenCounts:
        """The counts of prompt and output, brought up to date."""
        if self._committed is None:
            for token in self.prompt_ids:
                self._add(token, 0)
        elif self._num_counted == len(self.output_ids):
            return self._committed
        for token in self.output_ids[self._num_counted :]:
            self._add(token, 1)
        self._num_counted = len(self.output_ids)
        ids = np.fromiter(self._place_of, np.int64, len(self._times))
        self._committed = TokenCounts(ids, np.array(self._times, np.int64))
        return self._committed

    def _add(self, token: int, times: int) -> None:
        place = self._place_of.setdefault(token, len(self._times))
        if place == len(self._times):
            self._times.append(0)
        self._times[place] += times
