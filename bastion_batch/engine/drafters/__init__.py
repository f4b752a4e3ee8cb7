"""Drafters: what proposes the candidates of a step.

A drafter returns marginals, the log-probabilities of the K best tokens at each of the next D
positions of every row. Losslessness does not depend on them: a bad drafter only costs time.

Marginals are all that a plain drafter knows. One with a head for it also offers
`ConditionalScores`: of the candidates of a position, given the tokens before them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.roofline import ModelShape
from bastion_batch.core.rounds import Frontier

if TYPE_CHECKING:
    from torch import Tensor

    from bastion_batch.engine.cache import KVCache


class Marginals(NamedTuple):
    """Proposals for R rows, on the host."""

    log_probs_RDK: NDArray[np.float32]
    """Decreasing along K; -inf for a token that must never be a candidate."""
    token_ids_RDK: NDArray[np.int64]


class DraftRow(NamedTuple):
    """What a drafter may know of a row: its key, and all its tokens, the last not yet cached."""

    key: int
    """Unique among the rows the drafter keeps."""
    token_ids: Sequence[int]
    depth: int
    """Positions that are wanted, at most D; a drafter may leave out those beyond."""


class Drafter(Protocol):
    """Proposes candidates. One call each per step for all rows that take part."""

    depth: int
    """D, the most positions proposed."""
    taps: tuple[int, ...]
    """0-based target layers whose outputs `observe` wants."""
    caches: "tuple[KVCache, ...]"
    """What it keeps of rows; an engine bounds them together with the target's."""

    @property
    def shape(self) -> ModelShape | None:
        """What its pass costs; None if it has none worth pricing."""
        ...

    @property
    def pending_bytes_per_row(self) -> int:
        """Memory of what may be put by for a row, beside the caches."""
        ...

    def reserve(self, key: int, num_tokens: int) -> None:
        """Make room for so many more context tokens of a row, new or known.

        Raises:
            CacheFull: there is no room; nothing was changed.
        """
        ...

    def share(self, source_key: int, key: int, num_tokens: int) -> None:
        """Make the first context tokens of one row the whole context of another, newly reserved."""
        ...

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: "Tensor") -> None:
        """Take in the taps of tokens that have become context; may put them by for `catch_up`.

        Args:
            keys: rows; an unknown one is new and begins at position 0.
            counts: how many consecutive tokens of each, in the order of `features_SF`.
            features_SF: `[sum(counts), T * E]`.
        """
        ...

    def narrow(self, num_ids: int) -> None:
        """Only token ids below this are worth proposing from now on; others may be left out."""
        ...

    def num_pending(self, key: int) -> int:
        """Context tokens of a row that were put by."""
        ...

    def catch_up(self, keys: Sequence[int]) -> None:
        """Take in what was put by for some rows; `draft` does so too, if it must."""
        ...

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """Propose what follows each row's last token."""
        ...

    def forget(self, key: int) -> None:
        """Drop what is kept for a row."""
        ...


@runtime_checkable
class ConditionalScores(Protocol):
    """Scores the candidates that were drafted given their parent; some drafters do."""

    def log_probs_after(self, frontier: Frontier) -> NDArray[np.floating]:
        """Log-probabilities `[N, K]` of the candidates after some parents, at most 0.

        Of the last `draft`, whose rows the frontier counts and whose candidates keep their places
        along K. A frontier is asked about after that of the depth before. Candidates that were
        never possible may have any value.
        """
        ...
