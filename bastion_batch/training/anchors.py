"""Which blocks a training step is made of.

An anchor is the last committed token of a would-be decode step: the block after it is predicted
from the context before it. Uniform anchors flatter a drafter: steps of a real loop begin where the
drafter has just failed, so on the hard positions of a text. Therefore part of the anchors is drawn
where a step of the drafter in training has landed: an anchor whose first n predictions were right
lands n + 1 tokens further on, and one that reaches the end lands on the text's first anchor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ORDER, _DRAWS = 1, 2


class TextSpan(NamedTuple):
    """Where the anchors of a text are: its output tokens that have another one after them."""

    first: int
    """The first output token."""
    stop: int
    """The last token of the text, which is no anchor."""


class Blocks(NamedTuple):
    """What one step trains on."""

    numbers: list[int]
    """Texts."""
    anchors: list[NDArray[np.int64]]
    """Rising positions in each of them, at least one."""


class AnchorSampler:
    """Texts and anchors of every step, the same for the same seed, landings and step.

    Args:
        spans: of all texts; each has an anchor.
        num_texts: of a step.
        num_anchors: of a text in a step, or all it has.
        landing_share: of the anchors that are drawn among the landings.
        seed: of texts and anchors.
    """

    def __init__(
        self,
        spans: Sequence[TextSpan],
        *,
        num_texts: int,
        num_anchors: int,
        landing_share: float,
        seed: int,
    ) -> None:
        self._spans = spans
        self._num_texts = num_texts
        self._num_anchors = num_anchors
        self._landing_share = landing_share
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64]] | None = None
        counts = [span.stop - span.first for span in spans]
        assert min(counts) > 0, "a text without an anchor"
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        self.landed = np.zeros(self._offsets[-1], np.bool_)
        """All texts' anchors, one after the other: whether a step begins there."""

    def draw(self, step: int) -> Blocks:
        """The texts of a step in the epoch's order, and anchors of each."""
        generator = np.random.default_rng((self._seed, _DRAWS, step))
        first = step * self._num_texts
        numbers = [self._text_at(place) for place in range(first, first + self._num_texts)]
        return Blocks(numbers, [self._anchors_of(number, generator) for number in numbers])

    def land(self, blocks: Blocks, accepted: Sequence[NDArray[np.int64]]) -> None:
        """Note where the steps from these anchors end; `accepted` counts right predictions."""
        for number, anchors, counts in zip(blocks.numbers, blocks.anchors, accepted, strict=True):
            span = self._spans[number]
            landed = self._landed_of(number)
            landed[anchors - span.first] = False
            next_anchors = anchors + counts + 1
            next_anchors[next_anchors >= span.stop] = span.first
            landed[next_anchors - span.first] = True

    def _text_at(self, place: int) -> int:
        epoch, within = divmod(place, len(self._spans))
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, _ORDER, epoch))
            self._order = epoch, generator.permutation(len(self._spans))
        return int(self._order[1][within])

    def _anchors_of(self, number: int, generator: np.random.Generator) -> NDArray[np.int64]:
        landed = self._landed_of(number)
        wanted = min(self._num_anchors, len(landed))
        landings = np.flatnonzero(landed)
        num_landings = min(len(landings), round(self._landing_share * wanted))
        chosen = generator.choice(landings, num_landings, replace=False)
        others = np.setdiff1d(np.arange(len(landed)), chosen)
        rest = generator.choice(others, wanted - num_landings, replace=False)
        return self._spans[number].first + np.sort(np.concatenate([chosen, rest])).astype(np.int64)

    def _landed_of(self, number: int) -> NDArray[np.bool_]:
        return self.landed[self._offsets[number] : self._offsets[number + 1]]
