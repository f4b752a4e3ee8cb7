"""Whether to draft at all: for a batch of some size, and for each of its rows.

Plain decoding needs no drafter pass: when it proves to be faster the drafter is left out, and tried
again after an exponential back-off. What drafting gains is what was predicted of a step, put right
by how such predictions have turned out: a step's own outcome is mostly chance.
"""

import math
from collections.abc import Sequence


class DraftGate:
    """Decides step by step whether to draft, by whether drafting was worth it when it was tried.

    While it may pay it is done. When the mean gain of recent drafted steps is below zero by more
    than its own uncertainty, the next `wait` steps go without, then a trial begins anew; `wait`
    doubles from trial to trial, so that trials cost a vanishing share of the time, and starts over
    once the mean gain is above zero by as much. Between the two bounds nothing changes: near
    break-even the decision does not flap.

    Args:
        noise: standard deviation of the gain of one step.
        max_wait: most steps from one trial to the next.
    """

    MIN_WAIT = 8
    LONG_TRIAL = 4
    PATIENCE = 1.5
    """In a shorter trial the mean must be below zero by so many times its uncertainty."""
    HORIZONS = (16, 128)
    """Drafted steps that the two means go back: one to notice a change, one to be sure."""

    def __init__(self, noise: float, max_wait: int = 256) -> None:
        self._noise = noise
        self._max_wait = max_wait
        self._wait = self.MIN_WAIT
        self._resume_at = 0
        self._means = [0.0 for _ in self.HORIZONS]
        self._num_observed = 0

    def wants_draft(self, step: int) -> bool:
        """Whether to draft in this step; steps are counted by the caller."""
        return step >= self._resume_at

    def observe(self, step: int, gain: float) -> None:
        """Take note of a drafted step.

        Args:
            step: its number.
            gain: tokens more than without drafting in the same time; a share or a number, as
                `noise` is.
        """
        self._num_observed += 1
        counts = [min(self._num_observed, horizon) for horizon in self.HORIZONS]
        self._means = [m + (gain - m) / n for m, n in zip(self._means, counts, strict=True)]
        doubts = [self._noise / math.sqrt(n) for n in counts]
        pairs = list(zip(self._means, doubts, strict=True))
        patience = 1.0 if self._num_observed >= self.LONG_TRIAL else self.PATIENCE
        if any(mean < -patience * doubt for mean, doubt in pairs):
            self._resume_at = step + 1 + self._wait
            self._wait = min(2 * self._wait, self._max_wait)
            self._num_observed = 0
        elif all(mean > doubt for mean, doubt in pairs):
            self._wait = self.MIN_WAIT


class TrackRecord:
    """How much better or worse drafted steps turn out than they were predicted.

    The last steps count, in all some `HORIZON` of them, and at first as many in which predictions
    were right as `PRIOR`.
    """

    HORIZON = 128
    PRIOR = 16

    def __init__(self) -> None:
        self._predicted_tokens = self._tokens = 0.0
        self._predicted_seconds = self._seconds = 0.0
        self._is_new = True

    @property
    def factor(self) -> float:
        """Tokens per second of drafted steps over what was predicted of them."""
        if self._is_new:
            return 1.0
        return self._tokens / self._predicted_tokens * self._predicted_seconds / self._seconds

    def add(
        self, *, predicted_tokens: float, tokens: float, predicted_seconds: float, seconds: float
    ) -> None:
        """Take note of a drafted step."""
        if self._is_new:
            self._is_new = False
            self._predicted_tokens = self._tokens = self.PRIOR * predicted_tokens
            self._predicted_seconds = self._seconds = self.PRIOR * predicted_seconds
        kept = 1 - 1 / self.HORIZON
        self._predicted_tokens = kept * self._predicted_tokens + predicted_tokens
        self._tokens = kept * self._tokens + tokens
        self._predicted_seconds = kept * self._predicted_seconds + predicted_seconds
        self._seconds = kept * self._seconds + seconds


class BatchGates:
    """A gate per power of two of the batch size, as what pays depends on it.

    A size that is new, or that comes back after its wait is over, is tried at once.
    """

    ROW_NOISE = 0.35
    """Standard deviation of one row's gain, as a share of what it would commit plainly."""

    def __init__(self) -> None:
        self._gates: dict[int, DraftGate] = {}
        self._step = 0

    def wants_draft(self, num_rows: int) -> bool:
        """Whether to run the drafter in the coming step; asked once per step."""
        self._step += 1
        return self._gate(num_rows).wants_draft(self._step)

    def observe(self, num_rows: int, drafted_rate: float, plain_rate: float) -> None:
        """Take note of a drafted step: tokens per second to expect of it, and without drafting."""
        self._gate(num_rows).observe(self._step, drafted_rate / plain_rate - 1)

    def _gate(self, num_rows: int) -> DraftGate:
        size = num_rows.bit_length()
        if size not in self._gates:
            self._gates[size] = DraftGate(self.ROW_NOISE / math.sqrt(1 << (size - 1)))
        return self._gates[size]


class RowGates:
    """A gate per row: rows whose drafts are never accepted are left out of the draft pass."""

    MAX_WAIT = 64
    """Rows do not live for long."""
    NOISE = 0.3
    """Standard deviation of a row's expected gain, in tokens per step."""

    def __init__(self) -> None:
        self._gates: dict[int, DraftGate] = {}
        self._step = 0

    def wanting(self, keys: Sequence[int]) -> list[int]:
        """Places in `keys` of the rows to draft in the coming step; other rows are forgotten."""
        self._step += 1
        self._gates = {key: self._gates.get(key) or self._new() for key in keys}
        gates = enumerate(self._gates.values())
        return [place for place, gate in gates if gate.wants_draft(self._step)]

    def observe(self, keys: Sequence[int], gains: Sequence[float]) -> None:
        """Take note of tokens gained by drafting some rows, less what their drafts cost."""
        for key, gain in zip(keys, gains, strict=True):
            self._gates[key].observe(self._step, gain)

    def _new(self) -> DraftGate:
        return DraftGate(self.NOISE, self.MAX_WAIT)
