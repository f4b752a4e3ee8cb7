"""The latency model: a roofline prior, corrected by what the device really takes."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.correction import ROWS, TOKENS, Correction, Place
from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.fitting import fit_roofline, fit_stairs, undisturbed
from bastion_batch.core.roofline import ModelShape, PassLoad, Roofline, Timing
from bastion_batch.core.stairs import Stairs

WINDOW = 64
"""Observations that the reported error is the median of."""

SHOWN_TOKENS = (1, 4, 16, 64, 256)
SHOWN_ROWS = (1, 8, 32)
SHOWN_CONTEXTS = (128, 2048)
"""Passes whose correction is shown in a summary; contexts are per row."""

OPTIMISM = 0.1
"""How much less than predicted a pass may take whose size was never observed, as a share."""


class LatencyModel:
    """Seconds of one kind of pass of one model on one device.

    Args:
        shape: the model's sizes.
        speed: the device's.
        roofline: a fitted one; the data sheet's if None.
        correction: a learnt one; none if None.
        stairs: how passes are counted, by roofline and correction alike.
    """

    def __init__(
        self,
        shape: ModelShape,
        speed: DeviceSpeed,
        roofline: Roofline | None = None,
        correction: Correction | None = None,
        stairs: Stairs = Stairs(),  # noqa: B008 - immutable
    ) -> None:
        self.shape = shape
        self.speed = speed
        self.stairs = stairs
        self.roofline = roofline or Roofline()
        self._prices = self.roofline.prices(shape, speed)
        self.correction = correction or Correction()
        self.num_observed = 0
        self._errors: deque[float] = deque(maxlen=WINDOW)
        self._visits = np.zeros((len(ROWS), len(TOKENS)))

    @property
    def median_error(self) -> float | None:
        """Median absolute relative error of the last predictions, each made before its outcome."""
        return float(np.median(self._errors)) if self._errors else None

    def fit(self, timings: Sequence[Timing]) -> None:
        """Fit stairs and roofline to timings, then put the correction through what is left.

        Where a pass of more tokens took less time, the smaller one is taken to have been disturbed.
        """
        timings = undisturbed(timings)
        self.stairs = fit_stairs(self.shape, self.speed, timings)
        self.roofline = fit_roofline(self.shape, self.speed, timings, self.stairs)
        self._prices = self.roofline.prices(self.shape, self.speed)
        loads = [self.stairs.of(timing.load) for timing in timings]
        bases = [float(self._prices.of(load)) for load in loads]
        self.correction = Correction.through(
            [_place(load) for load in loads],
            [float(np.log(t.seconds / base)) for t, base in zip(timings, bases, strict=True)],
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
        """Predicted seconds of a pass of `num_tokens` spread evenly over `num_rows` rows.

        Args:
            num_tokens: roots and nodes; an array prices many passes.
            num_rows: rows in the pass.
            context_tokens: cached tokens, summed over the rows.
        """
        result = self.seconds_of(PassLoad.of(num_tokens, num_rows, context_tokens))
        return float(result) if np.ndim(num_tokens) == 0 else result

    def seconds_of(self, load: PassLoad) -> NDArray[np.float64]:
        """Predicted seconds of passes."""
        return self._seconds_of(self.stairs.of(load))

    def _seconds_of(self, counted: PassLoad) -> NDArray[np.float64]:
        tokens_N, num_rows, contexts = counted.num_tokens, counted.num_rows, counted.context_tokens
        return self._prices.of(counted) * self.correction.factors(tokens_N, num_rows, contexts)

    def hopeful_seconds_of(self, load: PassLoad) -> NDArray[np.float64]:
        """What passes may take at best, for all that is known: to choose by, so that sizes are tried.

        A size that was measured badly once, and so is never chosen, would stay wrong for ever.
        """
        counted = self.stairs.of(load)
        visits = self._visits[self._visited(counted)]
        return self._seconds_of(counted) * (1 - OPTIMISM / np.sqrt(1 + visits))

    def _visited(self, counted: PassLoad) -> tuple[int, NDArray[np.intp]]:
        """Which sizes of pass are taken for one: up to the next point of the grid."""
        rows = np.searchsorted(ROWS, min(counted.num_rows, ROWS[-1]))
        tokens = np.searchsorted(TOKENS, np.minimum(counted.num_tokens, TOKENS[-1]))
        return int(rows), tokens

    def base_seconds(self, load: PassLoad) -> float:
        """The roofline of a pass, without what was learnt since it was fitted."""
        return float(self._prices.of(self.stairs.of(load)))

    def observe(self, load: PassLoad, seconds: float) -> None:
        """Learn from a pass without prompts that took `seconds`."""
        counted = self.stairs.of(load)
        predicted = float(self._seconds_of(counted))
        self._errors.append(abs(predicted / seconds - 1))
        self.num_observed += 1
        self._visits[self._visited(counted)] += 1
        place = _place(counted)
        self.correction.observe(place, math.log(seconds / predicted))
        grid = PassLoad.of(_GRID_TOKENS, counted.num_rows, counted.context_tokens)
        self.correction.make_monotone(place, self._prices.of(grid))

    def scale(self, factor: float) -> None:
        """Take the device to be slower by a factor everywhere."""
        self.correction.shift(math.log(factor))

    def summary(self) -> dict[str, Any]:
        """What was fitted and how well it predicts, JSON-able.

        A part of the roofline that never bound in the timings is named in `unidentified`, and its
        coefficients are None.
        """
        error = self.median_error
        return {
            "peak_flops": self.speed.flops,
            "bandwidth_bytes_per_second": self.speed.bandwidth,
            "speed_source": self.speed.source,
            "stairs": self.stairs._asdict(),
            **_coefficients(self.roofline),
            "correction": self._shown_correction(),
            "median_absolute_relative_error": None if error is None else round(error, 4),
            "num_observed": self.num_observed,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything fitted and learnt, JSON-able; `from_dict` reads it back."""
        return {
            "speed": self.speed._asdict(),
            "stairs": list(self.stairs),
            "roofline": self.roofline.to_dict(),
            "correction": self.correction.to_dict(),
        }

    @classmethod
    def from_dict(cls, shape: ModelShape, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote for a model of the same shape.

        Raises:
            KeyError, TypeError or ValueError: it is something else.
        """
        speed = DeviceSpeed(**data["speed"])
        if not (0 < speed.flops < math.inf and 0 < speed.bandwidth < math.inf):
            raise ValueError(f"peak {speed.flops} and bandwidth {speed.bandwidth} of a device")
        roofline = Roofline.from_dict(data["roofline"])
        tile, share = data["stairs"]
        if not (1 <= tile < math.inf and 0 <= share <= 1):
            raise ValueError(f"stairs of {tile} tokens, of which {share} come with the first")
        correction = Correction.from_dict(data["correction"])
        return cls(shape, speed, roofline, correction, Stairs(int(tile), float(share)))

    def _shown_correction(self) -> list[dict[str, Any]]:
        tokens = self.stairs.counted(np.array(SHOWN_TOKENS, np.float64))
        return [
            {
                "num_rows": rows,
                "context_per_row": context,
                "factors": dict(
                    zip(
                        map(str, SHOWN_TOKENS),
                        self.correction.factors(tokens, rows, rows * context).round(4).tolist(),
                        strict=True,
                    )
                ),
            }
            for rows in SHOWN_ROWS
            for context in SHOWN_CONTEXTS
        ]


_GRID_TOKENS = np.array(TOKENS, np.float64)


def _place(counted: PassLoad) -> Place:
    return Place.of(float(counted.num_tokens), counted.num_rows, counted.context_tokens)


def _coefficients(roofline: Roofline) -> dict[str, Any]:
    """The roofline's coefficients by name: None where the timings say nothing of them."""
    values = {
        "alpha_compute": ("compute", roofline.compute.alpha),
        "beta_compute_seconds": ("compute", roofline.compute.beta),
        "alpha_memory": ("memory", roofline.memory.alpha),
        "beta_memory_seconds": ("memory", roofline.memory.beta),
        "alpha_attention_compute": ("attention", roofline.attention_compute),
        "alpha_attention_memory": ("attention", roofline.attention_memory),
    }
    unknown = roofline.unidentified
    known = {name: None if part in unknown else value for name, (part, value) in values.items()}
    return {**known, "unidentified": list(unknown)}
