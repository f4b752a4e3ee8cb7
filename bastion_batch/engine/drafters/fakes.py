"""Drafters without weights, for tests and for measuring what drafting itself costs or gains.

Losslessness does not depend on a drafter's quality, so the extremes prove the plumbing: one that
proposes exactly what the target will say, one that never does, one that guesses, one that is mute.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.drafters import DraftRow, Marginals


class _Stateless:
    taps: tuple[int, ...] = ()
    shape = None
    caches: tuple[KVCache, ...] = ()
    pending_bytes_per_row = 0

    def reserve(self, key: int, num_tokens: int) -> None:
        """Nothing needs room."""

    def share(self, source_key: int, key: int, num_tokens: int) -> None:
        """Nothing is kept."""

    def observe(self, keys: Sequence[int], counts: Sequence[int], features_SF: Tensor) -> None:
        """Nothing is kept."""

    def narrow(self, num_ids: int) -> None:
        """Nothing is saved by it."""

    def num_pending(self, key: int) -> int:
        """Nothing is put by."""
        return 0

    def catch_up(self, keys: Sequence[int]) -> None:
        """Nothing was put by."""

    def forget(self, key: int) -> None:
        """Nothing was kept."""


class ScriptedDrafter(_Stateless):
    """Knows every row's output beforehand.

    Args:
        outputs: the output that follows each prompt.
        vocab_size: V.
        depth: D.
        shift: added to every token, modulo V: anything but 0 makes every proposal wrong.
    """

    def __init__(
        self,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        depth: int,
        shift: int = 0,
    ) -> None:
        self.depth = depth
        self._texts = [(*prompt, *output) for prompt, output in outputs.items()]
        self._vocab_size = vocab_size
        self._shift = shift

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """The script's next tokens, nearly certain, each with one alternative."""
        shape = (len(rows), self.depth, 2)
        ids = np.zeros(shape, np.int64)
        log_probs = np.broadcast_to(np.log(np.array([0.9, 0.1], np.float32)), shape).copy()
        for number, row in enumerate(rows):
            coming = self._after(tuple(row.token_ids))
            ids[number, : len(coming), 0] = coming
            ids[number, :, 1] = (ids[number, :, 0] + 1) % self._vocab_size
            log_probs[number, len(coming) :] = -np.inf
        return Marginals(log_probs, (ids + self._shift) % self._vocab_size)

    def _after(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        count = len(token_ids)
        text = next((t for t in self._texts if t[:count] == token_ids), token_ids)
        return text[count : count + self.depth]


class RandomDrafter(_Stateless):
    """Proposes random tokens with random, sorted probabilities.

    Args:
        vocab_size: V.
        depth: D.
        num_ranks: K.
        seed: of its own generator.
    """

    def __init__(self, vocab_size: int, depth: int, num_ranks: int, seed: int = 0) -> None:
        self.depth = depth
        self._vocab_size = vocab_size
        self._num_ranks = min(num_ranks, vocab_size)
        self._generator = np.random.default_rng(seed)

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """Distinct tokens at every position, in random order."""
        shape = (len(rows), self.depth, self._vocab_size)
        order = self._generator.random(shape).argsort(-1)[:, :, : self._num_ranks]
        weights = self._generator.dirichlet(np.ones(self._num_ranks), shape[:2])
        log_probs = np.log(np.sort(weights, -1)[:, :, ::-1] + 1e-12)
        return Marginals(np.minimum(log_probs, 0).astype(np.float32), order)


class MuteDrafter(_Stateless):
    """Proposes nothing."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        """One candidate per position that must never be taken."""
        shape = (len(rows), self.depth, 1)
        return Marginals(np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64))
