"""How fast a worker goes at a batch size, fitted while it works.

A worker with `b` live rows commits `saturated * b / (b + half)` tokens a second: nearly in
proportion to the rows while they are few, and never more than `saturated`. So a row waits
`(b + half) / saturated` seconds for each of its tokens, a straight line in `b`; prompts that enter
meanwhile hold it up by so much per prompt token. Those three numbers are fitted: with forgetting,
so that a device that throttles is followed, and robustly, so that a step that was held up by
something else counts for little.

A worker that has always been full shows one point of its line. What is missing comes from a prior
(another worker of the same kind) and, where there is none, from an assumption: `Fit` says which.
"""

import math
from typing import Literal, NamedTuple

HALF_LIFE_SECONDS = 30.0
"""Of a sample's weight, in time at work."""
MAX_DEVIATION = 3.0
"""A sample counts as no more than this many typical deviations from what was expected."""
DEVIATION_RATE = 0.3
MIN_DEVIATION = 0.02
"""Typical deviation at the least, as a share of what is expected."""
ASSUMED_HALF_SHARE = 1 / 6
"""Where nothing else is known, `half` as a share of the largest batch."""
ASSUMED_PREFILL_RATIO = 6.0
"""Where nothing else is known, prompt tokens per second over `saturated`."""
MAX_RATIO = 3.0
"""`half` and the prefill ratio are at most so many times what is assumed of them, and at least so
small a part of it."""
PRIOR_SECONDS = 6.0
"""What a prior is worth, in seconds of samples."""
FIRST_SECONDS = 0.5
"""Samples of less than this together say nothing yet."""

Source = Literal["measured", "prior", "assumed"]


class RateCurve(NamedTuple):
    """Tokens per second of a worker as a function of its live rows."""

    saturated: float
    """Tokens per second that ever more rows come near to."""
    half: float
    """Rows at which it makes half of that."""
    prefill: float
    """Prompt tokens per second while nothing is decoded."""

    def total(self, batch: float) -> float:
        """Tokens per second of all rows together."""
        return self.saturated * batch / (batch + self.half) if batch > 0 else 0.0

    def per_row(self, batch: float) -> float:
        """Tokens per second of each row when there are so many, at least one."""
        return self.saturated / (max(batch, 1.0) + self.half)


class RateSample(NamedTuple):
    """What a worker did between two reports."""

    batch: float
    """Live rows, on average over the steps."""
    seconds: float
    """Time spent in steps."""
    tokens: float
    """Tokens committed."""
    prefill_tokens: float = 0.0
    """Of prompts and prefixes that entered."""


class Fit(NamedTuple):
    """A curve, and how much of it is known."""

    curve: RateCurve
    half_from: Source
    """Where `half` comes from: measured once batches of different size were seen."""


class _Sums(NamedTuple):
    """Weighted sums of products: b = batch, q = prefill share, s = seconds per token of a row."""

    n: float = 0.0
    b: float = 0.0
    q: float = 0.0
    s: float = 0.0
    bb: float = 0.0
    bq: float = 0.0
    bs: float = 0.0
    qq: float = 0.0
    qs: float = 0.0

    def times(self, factor: float) -> "_Sums":
        return _Sums._make([factor * value for value in self])

    def plus(self, weight: float, b: float, q: float, s: float) -> "_Sums":
        """With one point more."""
        return _Sums(
            self.n + weight,
            self.b + weight * b,
            self.q + weight * q,
            self.s + weight * s,
            self.bb + weight * b * b,
            self.bq + weight * b * q,
            self.bs + weight * b * s,
            self.qq + weight * q * q,
            self.qs + weight * q * s,
        )

    def plane(self) -> tuple[float, float, float]:
        """The least squares of `s = constant + per_row * b + per_prefill * q`, in this order."""
        bb, bq = self.bb - self.b * self.b / self.n, self.bq - self.b * self.q / self.n
        qq, qs = self.qq - self.q * self.q / self.n, self.qs - self.q * self.s / self.n
        bs = self.bs - self.b * self.s / self.n
        determinant = bb * qq - bq * bq
        if determinant > 0:
            per_row = (bs * qq - qs * bq) / determinant
            per_prefill = (qs * bb - bs * bq) / determinant
        else:  # rounded away: batch and prefill share went together
            per_row, per_prefill = bs / bb, 0.0
        constant = (self.s - per_row * self.b - per_prefill * self.q) / self.n
        return constant, per_row, per_prefill


class RateFit:
    """Fits one worker's curve online.

    Args:
        max_batch: rows that it can have live.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._sums = _Sums()
        self._deviation: float | None = None
        self._fit: Fit | None = None

    @property
    def fit(self) -> Fit | None:
        """The curve as far as it is known, or None before anything was measured."""
        return self._fit

    def add(self, sample: RateSample, prior: RateCurve | None = None) -> None:
        """Take a sample in; one without tokens, rows or time says nothing.

        Args:
            sample: from a report.
            prior: the curve of a worker of the same kind, if one was measured.
        """
        if sample.tokens <= 0 or sample.batch <= 0 or sample.seconds <= 0:
            return
        per_token = sample.batch / sample.tokens
        prefill_share = sample.prefill_tokens * per_token
        seconds = self._believed(sample.batch, prefill_share, sample.seconds * per_token)
        kept = self._sums.times(0.5 ** (sample.seconds / HALF_LIFE_SECONDS))
        self._sums = kept.plus(sample.seconds, sample.batch, prefill_share, seconds)
        if self._sums.n >= FIRST_SECONDS:
            self._fit = self._fitted(prior)

    def _believed(self, batch: float, prefill_share: float, seconds: float) -> float:
        """Seconds per token of a row as far as they are believed; also follows how they stray."""
        if self._fit is None:
            return seconds
        curve = self._fit.curve
        expected = 1 / curve.per_row(batch) + prefill_share / curve.prefill
        known = 0.1 * expected if self._deviation is None else self._deviation
        limit = MAX_DEVIATION * max(known, MIN_DEVIATION * expected)
        error = min(max(seconds - expected, -limit), limit)
        self._deviation = known + DEVIATION_RATE * (abs(error) - known)
        return expected + error

    def _fitted(self, prior: RateCurve | None) -> Fit:
        """The line through the samples and, for what they leave open, through the prior."""
        assumed_half = ASSUMED_HALF_SHARE * self._max_batch
        half = assumed_half if prior is None else prior.half
        ratio = ASSUMED_PREFILL_RATIO if prior is None else prior.prefill / prior.saturated
        weight, batch = self._sums.n, self._sums.b / self._sums.n
        share, seconds = self._sums.q / weight, self._sums.s / weight
        slope = seconds / (batch + half + share / ratio)
        sums, full = self._sums, float(self._max_batch)
        for b, q in ((full, 0.0), (full / 4, 0.0), (full, full / 4)):
            sums = sums.plus(PRIOR_SECONDS / 3, b, q, slope * (b + half + q / ratio))
        fitted, per_row, per_prefill = sums.plane()
        half_now = _within(fitted / per_row if per_row > 0 else math.inf, assumed_half)
        ratio_now = _within(
            per_row / per_prefill if per_prefill > 0 else math.inf, ASSUMED_PREFILL_RATIO
        )
        slope = seconds / (batch + half_now + share / ratio_now)
        spread = self._sums.bb / weight - batch**2
        is_measured = spread * weight > PRIOR_SECONDS * (self._max_batch / 4) ** 2
        source: Source = "measured" if is_measured else "assumed" if prior is None else "prior"
        return Fit(RateCurve(1 / slope, half_now, ratio_now / slope), source)


def _within(value: float, assumed: float) -> float:
    return min(max(value, assumed / MAX_RATIO), assumed * MAX_RATIO)
