"""Drafters: what proposes the candidates of a step.

A drafter returns marginals, the log-probabilities of the K best tokens at each of the next D
positions of every row. Losslessness does not depend on them: a bad drafter only costs time.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.roofline import ModelShape


class Marginals(NamedTuple):
    """Proposals for R rows, on the host."""

    log_probs_RDK: NDArray[np.float32]
    """Decreasing along K; -inf for a token that must never be a candidate."""
    token_ids_RDK: NDArray[np.int64]


class DraftRow(NamedTuple):
    """What a drafter may know of a row: its key, and all its tokens, the last not yet cached."""

    key: int
    """Unique among all rows the drafter has ever seen."""
    token_ids: Sequence[int]


class Drafter(Protocol):
    """Proposes candidates. One call each per step for all rows that take part."""

    depth: int
    """D, the most positions proposed."""
    taps: tuple[int, ...]
    """0-based target layers whose outputs `observe` wants."""

    @property
    def shape(self) -> ModelShape | None:
        """What its pass costs; None if it has none worth pricing."""
        ...

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Take in the taps of tokens that have become context.

        Args:
            keys: rows; an unknown one is new and begins at position 0.
            counts: how many consecutive tokens of each, in the order of `features_SF`.
            features_SF: `[sum(counts), T * E]`.
        """
        ...

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """Propose what follows each row's last token."""
        ...

    def forget(self, key: int) -> None:
        """Drop what is kept for a row."""
        ...
