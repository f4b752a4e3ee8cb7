"""Which part of the vocabulary is worth scoring for candidates.

Scoring a draft reads the target's whole head, which for a small target is most of a draft pass.
Byte-pair vocabularies are in the order of their merges, so that frequent tokens have low ids; and a
drafter is hardly ever right about a rare one. So only a prefix of the vocabulary is scored, once it
is known that hardly any token that was accepted lies beyond it. Text does not depend on it.
"""

import math
from collections.abc import Sequence

import numpy as np

PARTS = (1 / 8, 1 / 4, 1 / 2)
"""Parts of the vocabulary that are tried, the smallest first."""
MAX_LOST = 0.02
"""Share of the accepted tokens that may lie beyond the part: some 1 % of all tokens, as about half of
them were drafted. A quarter of the head is 2 % of a step of 16 rows on a CPU."""
MIN_ACCEPTED = 100
"""Accepted tokens that must have been seen before anything is left out."""
ALIGNMENT = 256


class DraftVocabulary:
    """Learns the part from the tokens that are accepted: the more were seen, the smaller it may be.

    When the text changes its nature, so that clearly more of it lies beyond the part than when the
    part was chosen, all is scored and learnt anew.

    Args:
        vocab_size: token ids.
    """

    HORIZON = 1000
    """Tokens of text over which the share beyond the part is averaged."""
    MAX_RISE = 0.05

    def __init__(self, vocab_size: int) -> None:
        sizes = (math.ceil(part * vocab_size / ALIGNMENT) * ALIGNMENT for part in PARTS)
        self._sizes = np.array([size for size in sizes if size < vocab_size] + [vocab_size])
        self._start()

    @property
    def num_ids(self) -> int:
        """The ids below this are scored."""
        return int(self._sizes[self._place])

    def observe(self, text_ids: Sequence[int], accepted_ids: Sequence[int]) -> None:
        """Take in what a step has committed.

        Args:
            text_ids: all tokens of all rows.
            accepted_ids: those of them that had been drafted.
        """
        if not len(text_ids):
            return
        beyond = (np.asarray(text_ids)[:, None] >= self._sizes).sum(0)
        self._num_seen += len(text_ids)
        weight = len(text_ids) / min(self._num_seen, self.HORIZON)
        self._share_beyond += min(weight, 1.0) * (beyond / len(text_ids) - self._share_beyond)
        if self._share_beyond[self._place] > self._share_then + self.MAX_RISE:
            self._start()
        self._choose(accepted_ids)

    def _start(self) -> None:
        self._place = len(self._sizes) - 1
        self._num_seen = 0
        self._share_beyond = np.zeros(len(self._sizes))
        self._share_then = 0.0
        self._num_accepted = 0
        self._lost = np.zeros(len(self._sizes), np.int64)

    def _choose(self, accepted_ids: Sequence[int]) -> None:
        self._num_accepted += len(accepted_ids)
        self._lost += (np.asarray(accepted_ids, np.int64)[:, None] >= self._sizes).sum(0)
        if self._num_accepted >= MIN_ACCEPTED:
            enough = self._lost[: self._place + 1] <= MAX_LOST * self._num_accepted
            place = int(np.argmax(enough))  # what lies beyond the present part is never drafted
            if place < self._place:
                self._place = place
                self._share_then = float(self._share_beyond[place])
