"""What the roofline does not know: a factor over pass tokens, rows and context, learnt as we go.

The factor is kept in logarithms at the points of a grid and interpolated between them. How much an
observation says about another pass is one function, the kernel: something about every pass (a
throttled or shared device is slow everywhere), and the more the nearer the pass. By the same kernel
the first timings are spread over the grid (Gaussian-process regression) and every later observation
is (one step towards it at a fixed rate), so that sizes never tried are corrected by their
neighbours.

Shape letters: R rows, C contexts, N tokens of the grid, A points of one axis, P observations.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 4096, 16384)
"""Cached tokens per row."""
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Pass tokens."""

RATE = 0.15
"""Share of the (clipped) log error taken over by one observation, at its own place."""
SHARED = 0.35
"""Part of it taken over everywhere."""
ROW_LENGTH, CONTEXT_LENGTH, TOKEN_LENGTH = 2.0, 2.0, 1.0
"""Logarithmic distances over which the rest falls by a factor e."""
MAX_LOG_ERROR = 0.5
"""A single observation counts as no more than this, however wild."""
NOISE = 0.05
"""Error of a first timing, as a share of how far the factor itself varies."""


class _Axis:
    """One axis of the grid, in logarithms, with the kernel between its points."""

    def __init__(self, points: Sequence[int], length: float) -> None:
        self.points = list(points)
        self.logs_A = np.log(np.array(points, np.float64))
        self.kernel_AA = np.exp(-np.abs(self.logs_A[:, None] - self.logs_A) / length)
        self._logs: list[float] = self.logs_A.tolist()

    def at(self, value: float) -> "_At":
        """Where a value lies; beyond the ends it counts as the end."""
        log = math.log(min(max(value, self.points[0]), self.points[-1]))
        low = min(bisect_right(self._logs, log) - 1, len(self._logs) - 2)
        return _At(low, (log - self._logs[low]) / (self._logs[low + 1] - self._logs[low]))

    def spread(self, at: "_At") -> NDArray[np.float64]:
        """What an observation says about every point of the axis."""
        near = self.kernel_AA[at.low : at.low + 2]
        return near[0] + at.weight * (near[1] - near[0])


class _At(NamedTuple):
    """Between which points of an axis, and how near to the upper one."""

    low: int
    weight: float

    def of(self, values_A: NDArray[np.float64]) -> Any:  # noqa: ANN401 - a number, or an array's rows
        """Interpolate along the first dimension."""
        low = values_A[self.low]
        return low + self.weight * (values_A[self.low + 1] - low)


_ROWS = _Axis(ROWS, ROW_LENGTH)
_CONTEXTS = _Axis(CONTEXTS, CONTEXT_LENGTH)
_TOKENS = _Axis(TOKENS, TOKEN_LENGTH)
_SHAPE = (len(ROWS), len(CONTEXTS), len(TOKENS))


class Place(NamedTuple):
    """Where a pass lies on the grid."""

    rows: _At
    context: _At
    tokens: _At

    @classmethod
    def of(cls, num_tokens: float, num_rows: int, context_tokens: float) -> Self:
        """The place of a pass; `context_tokens` are summed over rows."""
        context = context_tokens / max(num_rows, 1)
        return cls(_ROWS.at(num_rows), _CONTEXTS.at(context), _TOKENS.at(num_tokens))

    def influence(self) -> NDArray[np.float64]:
        """How much an observation here says about every point of the grid, `[R, C, N]`."""
        rows_R, contexts_C = _ROWS.spread(self.rows), _CONTEXTS.spread(self.context)
        near_RC = (1 - SHARED) * rows_R[:, None] * contexts_C
        return SHARED + near_RC[:, :, None] * _TOKENS.spread(self.tokens)

    def of_grid(self, values_RCN: NDArray[np.float64]) -> float:
        """Interpolate values on the grid."""
        return float(self.tokens.of(self.context.of(self.rows.of(values_RCN))))


class Correction:
    """A positive factor as a function of pass tokens, rows and context per row."""

    def __init__(self, log_factors_RCN: NDArray[np.float64] | None = None) -> None:
        self._log_factors_RCN = np.zeros(_SHAPE) if log_factors_RCN is None else log_factors_RCN

    @classmethod
    def through(cls, places: Sequence[Place], log_factors: Sequence[float]) -> Self:
        """The smoothest correction through given points, near enough; twins are averaged."""
        influences = [place.influence() for place in places]
        kernel_PP = np.array([[place.of_grid(other) for place in places] for other in influences])
        kernel_PP[np.diag_indices(len(places))] += NOISE**2
        weights_P = np.linalg.solve(kernel_PP, np.array(log_factors))
        return cls(np.tensordot(weights_P, np.array(influences), 1))

    def factors(
        self, num_tokens: NDArray[np.float64], num_rows: int, context_tokens: float
    ) -> NDArray[np.float64]:
        """The factor of passes of so many tokens."""
        line_N = self._line(Place.of(1, num_rows, context_tokens))
        return np.exp(np.interp(np.log(num_tokens), _TOKENS.logs_A, line_N))

    def observe(self, place: Place, log_error: float) -> None:
        """Take over some of a logarithmic error `log(seconds / predicted)` seen at a place."""
        influence_RCN = place.influence()
        step = RATE * min(max(log_error, -MAX_LOG_ERROR), MAX_LOG_ERROR)
        self._log_factors_RCN += step / place.of_grid(influence_RCN) * influence_RCN

    def shift(self, log_factor: float) -> None:
        """Multiply the factor everywhere."""
        self._log_factors_RCN += log_factor

    def make_monotone(self, place: Place, base_seconds_N: NDArray[np.float64]) -> None:
        """Believe the size just observed where another one contradicts it.

        A larger pass is never faster: smaller sizes may not be predicted to take longer than
        this one, nor larger ones to take less. Without it a pessimistic guess about a size that is
        never tried would never be corrected.

        Args:
            place: the pass observed.
            base_seconds_N: the roofline at the grid's sizes, for its rows and contexts.
        """
        log_seconds_N = np.log(base_seconds_N) + self._line(place)
        log_at = place.tokens.of(log_seconds_N)
        split = place.tokens.low + 1
        change_N = np.empty_like(log_seconds_N)
        change_N[:split] = np.minimum(log_at - log_seconds_N[:split], 0)
        change_N[split:] = np.maximum(log_at - log_seconds_N[split:], 0)
        if change_N.any():
            row, context = place.rows.low, place.context.low
            self._log_factors_RCN[row : row + 2, context : context + 2] += change_N

    def to_dict(self) -> dict[str, Any]:
        """The grid and the logarithms at its points, JSON-able; `from_dict` reads them back."""
        return {"grid": _grid(), "log_factors": np.round(self._log_factors_RCN, 4).tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError or ValueError: its grid is not this one, or a value is not finite.
        """
        values = np.array(data["log_factors"], np.float64)
        if data["grid"] != _grid() or values.shape != _SHAPE or not np.isfinite(values).all():
            raise ValueError("the correction's grid or values are not those of this version")
        return cls(values)

    def _line(self, place: Place) -> NDArray[np.float64]:
        """The logarithms along tokens, at a place's rows and context."""
        return place.context.of(place.rows.of(self._log_factors_RCN))


def _grid() -> list[list[int]]:
    return [list(ROWS), list(CONTEXTS), list(TOKENS)]
