"""The budget rule: how many nodes of the whole batch are worth verifying in this step.

`G(N) = R + sum of the N largest scores`; the controller takes the N that maximises
`G(N) / (T_draft + T_aux + T_verify(N))`, scanning every N because a measured latency is a staircase
and the first decrease need not be the last. Plain decoding needs no drafter pass: when it proves to
be faster the drafter is left out, and tried again after an exponential back-off.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Budget(NamedTuple):
    """What a step is worth."""

    num_nodes: int
    expected_tokens: float
    """Over all rows, bonus tokens included."""
    tokens_per_second: float
    """Predicted, of the step."""


def best_budget(
    log_scores_N: NDArray[np.floating], num_rows: int, step_seconds_N: NDArray[np.floating]
) -> Budget:
    """The number of nodes with the most predicted tokens per second.

    Args:
        log_scores_N: path log-probabilities of the candidates, decreasing.
        num_rows: live rows, each of which commits at least its bonus token.
        step_seconds_N: predicted seconds of the whole step with 0, 1, ..., len(log_scores_N) nodes.
    """
    gains = num_rows + np.concatenate([[0.0], np.cumsum(np.exp(log_scores_N))])
    rates = gains / step_seconds_N
    num_nodes = int(np.argmax(rates))
    return Budget(num_nodes, float(gains[num_nodes]), float(rates[num_nodes]))


class DraftGate:
    """Decides step by step whether to draft, by whether drafting was worth it when it was tried.

    While it may pay it is done. When the mean gain of recent drafted steps is below zero by more
    than its own uncertainty, the next `wait` steps go without, then a trial begins anew; `wait`
    doubles from trial to trial, so that trials cost a vanishing share of the time. After a trial that
    leaves no doubt it is never so short that what was lost in it was more than `MAX_LOSS` of it. It
    starts over once the mean gain is above zero by as much. Between the two bounds nothing changes:
    near break-even the decision does not flap.

    Args:
        noise: standard deviation of the gain of one step, until it has been seen.
        max_wait: most steps from one trial to the next.
    """

    MIN_WAIT = 8
    MAX_LOSS = 0.02
    """Plain steps that a trial may have lost, of those that follow it."""
    NO_DOUBT = 2.5
    """The mean is below zero by so many times its uncertainty. Bad luck in the first steps of a good
    drafter is not: at one row it would cost a hundred steps without."""
    LONG_TRIAL = 4
    PATIENCE = 1.5
    """In a shorter trial the mean must be below zero by so many times its uncertainty."""
    STAKE = 0.75
    """Plain steps that a shorter trial may lose in any case: to begin one costs more, and its
    first steps, of kernels and caches that are not warm, are not what drafting is like."""
    HORIZONS = (16, 128)
    """Drafted steps that the two means go back: one to notice a change, one to be sure."""

    NOISE_WEIGHT = 8
    """Steps that the noise given at first is worth."""
    NOISE_HORIZON = 256
    """Steps over which noise is measured."""

    def __init__(self, noise: float, max_wait: int = 256) -> None:
        self._variance = noise**2
        self._variance_weight = self.NOISE_WEIGHT
        self._max_wait = max_wait
        self._wait = self.MIN_WAIT
        self._resume_at = 0
        self._lost = 0.0
        self._means = [0.0 for _ in self.HORIZONS]
        self._num_observed = 0
        self._last_gain: float | None = None

    @property
    def recent_gain(self) -> float:
        """The longer mean."""
        return self._means[-1]

    def wants_draft(self, step: int) -> bool:
        """Whether to draft in this step; steps are counted by the caller."""
        return step >= self._resume_at

    def lose(self, plain_steps: float) -> None:
        """Take note of what a drafted step lost or, below zero, won, in the time of plain ones."""
        self._lost += plain_steps

    def observe(self, step: int, gain: float) -> None:
        """Take note of a drafted step's gain.

        Args:
            step: its number.
            gain: tokens more than without drafting in the same time; a share or a number, as
                `noise` is.
        """
        self._measure_noise(gain)
        self._num_observed += 1
        counts = [min(self._num_observed, horizon) for horizon in self.HORIZONS]
        self._means = [m + (gain - m) / n for m, n in zip(self._means, counts, strict=True)]
        doubts = [math.sqrt(self._variance / n) for n in counts]
        pairs = list(zip(self._means, doubts, strict=True))
        is_long = self._num_observed >= self.LONG_TRIAL
        patience = 1.0 if is_long else self.PATIENCE
        may_end = is_long or self._lost >= self.STAKE
        if may_end and any(mean < -patience * doubt for mean, doubt in pairs):
            wait = self._wait
            if any(mean < -self.NO_DOUBT * doubt for mean, doubt in pairs):
                wait = min(max(wait, math.ceil(self._lost / self.MAX_LOSS)), self._max_wait)
            self._resume_at = step + 1 + wait
            self._wait = min(2 * wait, self._max_wait)
            self._num_observed, self._lost = 0, 0.0
        elif all(mean > doubt for mean, doubt in pairs):
            self._wait = self.MIN_WAIT

    def _measure_noise(self, gain: float) -> None:
        """By how far a step is from the one before: a slow change of the mean is no noise."""
        last, self._last_gain = self._last_gain, gain
        if last is None:
            return
        self._variance_weight = min(self._variance_weight + 1, self.NOISE_HORIZON)
        self._variance += ((gain - last) ** 2 / 2 - self._variance) / self._variance_weight


class PlainProbes:
    """Now and then a plain step while drafting goes on: what one takes must not stay a guess.

    They become rarer from time to time, and end where the gain is so clear that no guess can be as
    far off. Counted by power of two of the batch size.
    """

    FIRST_WAIT, MAX_WAIT = 8, 128
    """Drafted steps from one probe to the next, doubling."""
    LENGTH = 2
    """Plain steps of a probe."""
    CLEAR_GAIN = 0.25
    """A share; beyond it the first probe is the last one."""

    def __init__(self) -> None:
        self._waits: dict[int, int] = {}
        self._num_drafted: dict[int, int] = {}
        self._num_left = 0

    def is_due(self, num_rows: int, gain: float) -> bool:
        """Whether a step that would be drafted is to be a plain one.

        Args:
            num_rows: that decode.
            gain: of drafting lately, as a share.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        size = num_rows.bit_length()
        num_drafted, wait = self._num_drafted.get(size, 0), self._waits.get(size, self.FIRST_WAIT)
        if num_drafted < wait or (size in self._waits and gain > self.CLEAR_GAIN):
            self._num_drafted[size] = num_drafted + 1
            return False
        self._waits[size] = min(2 * wait, self.MAX_WAIT)
        self._num_drafted[size] = 0
        self._num_left = self.LENGTH - 1
        return True

    def postpone(self, num_rows: int) -> None:
        """A plain step was taken for another reason."""
        self._num_drafted[num_rows.bit_length()] = 0


class BatchGates:
    """A gate per power of two of the batch size, as what pays depends on it.

    A size that is new, or that comes back after its wait is over, is tried at once.
    """

    ROW_NOISE = 0.5
    """Standard deviation of one row's gain, as a share of what it would commit plainly: 0.35 with
    a weak drafter, 0.65 with one that has two tokens accepted per step."""
    SLOW_START = -0.5
    """Gain of a first drafted step that tells of more than a slow start."""

    def __init__(self) -> None:
        self._gates: dict[int, DraftGate] = {}
        self._step = 0
        self._last_drafted = -1
        self._unjudged: int | None = None

    def wants_draft(self, num_rows: int) -> bool:
        """Whether to run the drafter in the coming step; asked once per step."""
        self._step += 1
        return self._gate(num_rows).wants_draft(self._step)

    def recent_gain(self, num_rows: int) -> float:
        """Of drafting lately, as a share."""
        return self._gate(num_rows).recent_gain

    def observe(self, num_rows: int, drafted_rate: float, plain_rate: float) -> None:
        """Take note of a drafted step: its tokens per second, and those without drafting.

        The first one after plain ones finds nothing where it left it, and counts only where that
        is no excuse, or where every one is a first one.
        """
        size = num_rows.bit_length()
        resumes = self._step != self._last_drafted + 1 and size != self._unjudged
        self._last_drafted = self._step
        gate, gain = self._gate(num_rows), drafted_rate / plain_rate - 1
        gate.lose(plain_rate / drafted_rate - 1)
        self._unjudged = size if resumes and gain >= self.SLOW_START else None
        if self._unjudged is None:
            gate.observe(self._step, gain)

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
            self._gates[key].lose(-gain)
            self._gates[key].observe(self._step, gain)

    def _new(self) -> DraftGate:
        return DraftGate(self.NOISE, self.MAX_WAIT)


class DraftDepths:
    """How deep each row is drafted: as deep as its trees go, and a little deeper.

    Scoring a position is most of what drafting a row costs, and in a large batch few rows have
    nodes beyond their first positions. A row's depth follows its trees: down slowly, up at once.
    A tree that could have gone deeper does so a step later. A new row begins where rows of a batch
    of this size usually are.

    Args:
        max_depth: D; where the first rows of a batch size begin.
    """

    MARGIN = 1
    """Positions scored beyond the deepest node. A second one takes 5 % of the tokens per second of
    16 rows on a CPU, and brings 0.7 % of the tokens per step."""
    MAX_FALL = 2
    """Positions fewer from one step to the next."""
    RATE = 0.1
    """Of the running mean of what rows of a batch size want."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._depths: dict[int, int] = {}
        self._usual: dict[int, float] = {}

    def of(self, keys: Sequence[int]) -> list[int]:
        """Depths for the coming step; other rows are forgotten."""
        usual = self._usual.get(len(keys).bit_length(), self._max_depth)
        first = min(math.ceil(usual), self._max_depth)
        self._depths = {key: self._depths.get(key, first) for key in keys}
        return list(self._depths.values())

    def observe(self, keys: Sequence[int], tree_depths: Sequence[int]) -> None:
        """Take note of how deep the trees of some rows went."""
        wanted = [min(depth + self.MARGIN, self._max_depth) for depth in tree_depths]
        for key, depth in zip(keys, wanted, strict=True):
            self._depths[key] = max(depth, self._depths[key] - self.MAX_FALL)
        size, mean = len(keys).bit_length(), sum(wanted) / len(wanted)
        usual = self._usual.setdefault(size, mean)
        self._usual[size] += self.RATE * (mean - usual)
