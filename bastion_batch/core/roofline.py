"""The latency model: a roofline prior, corrected by what the device really takes.

`T = max(alpha_c * FLOPs / peak + beta_c, alpha_m * Bytes / bandwidth + beta_m) * correction`.
The four coefficients are fitted to timings of the very pass that verifies; the correction is a
table over pass tokens, seeded by the same timings and updated by every step.
Source of the form: BASTION (arXiv 2605.29727); the correction table is ours.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Pass tokens at which the correction is kept; between them it is interpolated in log tokens."""

PRIOR = (1.0, 0.0)
"""Alpha and beta of a branch that nothing is known of: the device's own speed."""

MIN_BRANCH_TIMINGS = 2
CLEAR_GAIN = 0.25
"""A fit with more freedom must leave no more than this share of the squared error."""

MIN_SECONDS = 1e-7
"""No pass is predicted to take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide what a pass costs."""

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    bytes_per_value: int

    @property
    def weights_per_layer(self) -> int:
        """Values of one layer's matrices."""
        attention = 2 * self.hidden_size * (self.num_q_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.ffn_size

    def flops(self, load: "PassLoad") -> NDArray[np.float64]:
        """Floating-point operations of a pass, head included."""
        linear = 2 * load.num_tokens * self.weights_per_layer
        attention = 4 * load.attended_pairs * self.num_q_heads * self.head_dim
        head = 2 * load.num_tokens * self.hidden_size * self.vocab_size
        return self.num_layers * (linear + attention) + head

    def moved_bytes(self, load: "PassLoad") -> NDArray[np.float64]:
        """Bytes moved by a pass: weights and head once, the rows' KV read, KV written, logits."""
        weights = self.num_layers * self.weights_per_layer + self.hidden_size * self.vocab_size
        kv = 2 * self.num_kv_heads * self.head_dim * self.num_layers
        values = weights + kv * (load.context_tokens + load.num_tokens)
        return self.bytes_per_value * (values + load.num_tokens * self.vocab_size)


class PassLoad(NamedTuple):
    """What a pass has to do. Fields broadcast, so that many passes are priced at once."""

    num_tokens: NDArray[np.float64]
    """Tokens through the linear layers."""
    context_tokens: NDArray[np.float64]
    """Cached tokens read by attention, summed over rows."""
    attended_pairs: NDArray[np.float64]
    """(query, key) pairs, summed over rows."""

    @classmethod
    def of(
        cls, num_tokens: float | NDArray[np.floating], num_rows: int, context_tokens: float
    ) -> "PassLoad":
        """A pass of `num_tokens` spread evenly over `num_rows` rows."""
        tokens = np.asarray(num_tokens, np.float64)
        context = np.asarray(context_tokens, np.float64)
        per_row = tokens / max(num_rows, 1)
        return cls(tokens, context, per_row * (context + tokens))


class Timing(NamedTuple):
    """One measured pass."""

    num_tokens: int
    num_rows: int
    context_tokens: int
    seconds: float


class CorrectionTable:
    """A positive factor as a function of pass tokens, learnt from (predicted, observed)."""

    RATE = 0.1
    """Share of the (clipped) log error taken over by one observation."""
    SHARED = 0.5
    """Part of it taken over at every size: a throttled or shared device is slow everywhere."""
    MAX_LOG_ERROR = 0.5
    """A single observation counts as no more than this, however wild."""

    def __init__(self, log_factors: NDArray[np.float64] | None = None) -> None:
        self._x = np.log(np.array(GRID, np.float64))
        self._log_factors = np.zeros(len(GRID)) if log_factors is None else log_factors

    @classmethod
    def through(cls, num_tokens: list[int], factors: list[float]) -> "CorrectionTable":
        """The table that passes through the given points."""
        table = cls()
        x = np.log(np.array(num_tokens, np.float64))
        table._log_factors = np.interp(table._x, x, np.log(np.array(factors)))
        return table

    def factor(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor at so many pass tokens."""
        return np.exp(np.interp(np.log(np.maximum(num_tokens, 1)), self._x, self._log_factors))

    def observe(self, num_tokens: int, predicted_seconds: float, seconds: float) -> None:
        """Move the factors next to `num_tokens` towards what was observed."""
        error = np.log(seconds / predicted_seconds)
        error = float(np.clip(error, -self.MAX_LOG_ERROR, self.MAX_LOG_ERROR))
        x = np.log(max(num_tokens, 1))
        above = int(np.clip(np.searchsorted(self._x, x), 1, len(GRID) - 1))
        weight = float(
            np.clip((x - self._x[above - 1]) / (self._x[above] - self._x[above - 1]), 0, 1)
        )
        self._log_factors[above - 1] += self.RATE * (1 - weight) * error
        self._log_factors[above] += self.RATE * weight * error
        self._log_factors += self.SHARED * self.RATE * error

    def make_monotone(self, base_seconds: NDArray[np.float64], num_tokens: int) -> None:
        """Believe the size just observed where another one contradicts it.

        A larger pass is never faster: smaller sizes may not be predicted to take longer than
        this one, nor larger ones to take less. Without it a pessimistic guess about a size that is
        never tried would never be corrected.

        Args:
            base_seconds: the roofline at the grid's sizes.
            num_tokens: the size observed.
        """
        base_at = float(np.interp(np.log(num_tokens), self._x, np.log(base_seconds)))
        log_at = base_at + float(np.interp(np.log(num_tokens), self._x, self._log_factors))
        log_seconds = np.log(base_seconds) + self._log_factors
        smaller = self._x < np.log(num_tokens)
        log_seconds = np.where(
            smaller, np.minimum(log_seconds, log_at), np.maximum(log_seconds, log_at)
        )
        self._log_factors = log_seconds - np.log(base_seconds)

    def as_list(self) -> list[float]:
        """The factors at the grid points."""
        return [round(float(f), 4) for f in np.exp(self._log_factors)]


class LatencyModel:
    """Seconds of one kind of pass of one model on one device.

    Args:
        shape: the model's sizes.
        peak_flops: the device's FLOP/s, in the pass's dtype.
        bandwidth: the device's memory bandwidth in bytes/s.
    """

    def __init__(self, shape: ModelShape, peak_flops: float, bandwidth: float) -> None:
        self.shape = shape
        self.peak_flops = peak_flops
        self.bandwidth = bandwidth
        self.compute = PRIOR
        self.memory = PRIOR
        self.correction = CorrectionTable()
        self.num_observed = 0
        self.residual = 0.0
        """Recent mean absolute relative error of the prediction."""

    def fit(self, timings: list[Timing]) -> None:
        """Fit the roofline to timings, then put the correction table through what is left.

        Every split of the timings by arithmetic intensity is tried, the lower part fitted by the
        memory branch and the rest by the compute branch; the one with the least relative error
        stands. One branch is preferred to two, and the one that the data sheet says to the other,
        unless the error falls clearly: noise must not invent a branch that never bound.
        """
        loads = [PassLoad.of(t.num_tokens, t.num_rows, t.context_tokens) for t in timings]
        seconds = np.array([t.seconds for t in timings])
        compute = np.array([float(self.shape.flops(load)) / self.peak_flops for load in loads])
        memory = np.array([float(self.shape.moved_bytes(load)) / self.bandwidth for load in loads])
        order = np.argsort(compute / memory, kind="stable")
        least_error = np.inf
        says_memory = int((memory >= compute).sum() * 2 >= len(timings)) * len(timings)
        both = range(MIN_BRANCH_TIMINGS, len(timings) - MIN_BRANCH_TIMINGS + 1)
        for num_memory in (says_memory, len(timings) - says_memory, *both):
            low, high = order[:num_memory], order[num_memory:]
            branches = (
                _fit_branch(memory[low], seconds[low]),
                _fit_branch(compute[high], seconds[high]),
            )
            predicted = np.maximum(_line(branches[0], memory), _line(branches[1], compute))
            error = float(np.square(predicted / seconds - 1).sum()) + 1e-9
            if error < CLEAR_GAIN * least_error:
                least_error = error
                self.memory, self.compute = branches
        self.correction = CorrectionTable()
        by_tokens: dict[int, list[float]] = {}
        for timing in timings:
            predicted = self.seconds(timing.num_tokens, timing.num_rows, timing.context_tokens)
            by_tokens.setdefault(timing.num_tokens, []).append(timing.seconds / predicted)
        tokens = sorted(by_tokens)
        self.correction = CorrectionTable.through(
            tokens, [float(np.median(by_tokens[n])) for n in tokens]
        )

    @overload
    def seconds(self, num_tokens: float, num_rows: int, context_tokens: float) -> float: ...
    @overload
    def seconds(
        self, num_tokens: NDArray[np.floating], num_rows: int, context_tokens: float
    ) -> NDArray[np.float64]: ...
    def seconds(
        self, num_tokens: float | NDArray[np.floating], num_rows: int, context_tokens: float
    ) -> float | NDArray[np.float64]:
        """Predicted seconds of a pass of `num_tokens` over `num_rows` rows.

        Args:
            num_tokens: roots, nodes and prefill tokens; an array prices many passes.
            num_rows: rows in the pass.
            context_tokens: cached tokens, summed over the rows.
        """
        load = PassLoad.of(num_tokens, num_rows, context_tokens)
        result = self._roofline(load) * self.correction.factor(load.num_tokens)
        return float(result) if np.ndim(num_tokens) == 0 else result

    def _roofline(self, load: PassLoad) -> NDArray[np.float64]:
        compute = _line(self.compute, self.shape.flops(load) / self.peak_flops)
        memory = _line(self.memory, self.shape.moved_bytes(load) / self.bandwidth)
        return np.maximum(np.maximum(compute, memory), MIN_SECONDS)

    def observe(self, num_tokens: int, num_rows: int, context_tokens: int, seconds: float) -> None:
        """Learn from a pass that took `seconds`."""
        predicted = self.seconds(num_tokens, num_rows, context_tokens)
        self.correction.observe(num_tokens, predicted, seconds)
        grid = self._roofline(PassLoad.of(np.array(GRID, np.float64), num_rows, context_tokens))
        self.correction.make_monotone(grid, num_tokens)
        self.num_observed += 1
        rate = max(0.02, 1 / self.num_observed)
        self.residual += rate * (abs(predicted / seconds - 1) - self.residual)

    def summary(self) -> dict[str, Any]:
        """What was fitted, JSON-able. A branch that never bound in the data has alpha 1, beta 0."""
        return {
            "peak_flops": self.peak_flops,
            "bandwidth_bytes_per_second": self.bandwidth,
            "alpha_compute": self.compute[0],
            "beta_compute_seconds": self.compute[1],
            "alpha_memory": self.memory[0],
            "beta_memory_seconds": self.memory[1],
            "correction_tokens": list(GRID),
            "correction_factors": self.correction.as_list(),
            "mean_absolute_relative_error": round(self.residual, 4),
            "num_observed": self.num_observed,
        }


def _line(coefficients: tuple[float, float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    alpha, beta = coefficients
    return alpha * x + beta


def _fit_branch(x: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares of relative error for `alpha * x + beta`, both at least 0.

    A branch without data keeps the prior.
    """
    if not len(x):
        return PRIOR
    if len(x) == 1:
        return float(seconds[0] / x[0]), 0.0
    design = np.stack([x, np.ones_like(x)], 1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(design, np.ones_like(x), rcond=None)[0]
    if beta < 0:
        return float(np.mean(x / seconds) / np.mean((x / seconds) ** 2)), 0.0
    if alpha < 0:
        return 0.0, float(np.mean(1 / seconds) / np.mean(1 / seconds**2))
    return float(alpha), float(beta)
