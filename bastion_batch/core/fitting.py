"""Fitting a roofline to timings: least squares of the relative error, coefficients at least 0."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.roofline import Branch, ModelShape, Roofline, Timing
from bastion_batch.core.stairs import Stairs

MIN_TIMINGS = 4
"""With fewer timings the coefficients keep their priors, and the correction takes up the rest."""
MIN_BRANCH_SIZES = 2
"""Different sizes that a branch needs in the timings."""

BETTER = 0.5
"""The branch that the data sheet does not expect must leave no more of the squared error."""
CLEARLY_BETTER = 0.25
"""Two branches must leave no more of it than one."""

RIDGE = 1e-4
"""Pull towards the prior, relative to a timing's weight: decides only what the data leaves open."""

TILES = (8, 16, 32, 64, 128)
TILE_SHARES = (0.5, 0.75, 0.9, 1.0)
"""Stairs that are tried."""
STAIRS_SIZES = 6
"""Different sizes of pass without which no stairs are looked for."""
STAIRS_GAIN = 0.5
"""Stairs must leave no more of the squared error than none."""


def fit_stairs(shape: ModelShape, speed: DeviceSpeed, timings: Sequence[Timing]) -> Stairs:
    """The stairs that explain the timings of one row after the shortest context, or none.

    Between rows and contexts other things differ as well.
    """
    single = [timing for timing in timings if timing.num_rows == 1]
    shortest = min((timing.context_tokens for timing in single), default=0)
    single = [timing for timing in single if timing.context_tokens == shortest]
    best = Stairs()
    if len({timing.num_tokens for timing in single}) < STAIRS_SIZES:
        return best
    least_error = STAIRS_GAIN * _squared_error(_Terms.of(shape, speed, single, best))
    for tile, share in product(TILES, TILE_SHARES):
        error = _squared_error(_Terms.of(shape, speed, single, Stairs(tile, share)))
        if error < least_error:
            best, least_error = Stairs(tile, share), error
    return best


def fit_roofline(
    shape: ModelShape,
    speed: DeviceSpeed,
    timings: Sequence[Timing],
    stairs: Stairs = Stairs(),  # noqa: B008 - immutable
) -> Roofline:
    """The roofline nearest to some timings, of passes that count as `stairs` says.

    Every split of the timings by pass tokens is tried: the smaller passes on the memory branch,
    the larger ones on the compute branch. One branch is preferred to two, and the one that the
    data sheet says to the other, unless the error falls clearly: noise must not invent a branch
    that never bound.
    """
    if len(timings) < MIN_TIMINGS:
        return Roofline()
    terms = _Terms.of(shape, speed, timings, stairs)
    best, _ = _nearest(terms)
    return best._replace(unidentified=_unidentified(best, terms))


def _squared_error(terms: "_Terms") -> float:
    return _nearest(terms)[1]


def _nearest(terms: "_Terms") -> tuple[Roofline, float]:
    """The roofline, and the squared error that it leaves."""
    best, least_error = Roofline(), np.inf
    for split in _splits(terms):
        found = _fit_split(terms, split.small)
        error = float(np.square(terms.seconds(found) / terms.measured - 1).sum()) + 1e-9
        if error < split.needed_gain * least_error:
            best, least_error = found, error
    return best, least_error


def undisturbed(timings: Sequence[Timing]) -> list[Timing]:
    """The timings, each no longer than that of a pass of more tokens, same rows and contexts.

    A pass that does more is never faster: on a busy machine the smaller one was held up.
    """
    return [
        timing._replace(
            seconds=min(
                other.seconds
                for other in timings
                if other[1:3] == timing[1:3] and other.num_tokens >= timing.num_tokens
            )
        )
        for timing in timings
    ]


class _Terms(NamedTuple):
    """Timed passes, and what their parts would take at the device's speeds."""

    measured: NDArray[np.float64]
    tokens: NDArray[np.float64]
    contexts_per_row: NDArray[np.float64]
    compute: NDArray[np.float64]
    memory: NDArray[np.float64]
    attention_compute: NDArray[np.float64]
    attention_memory: NDArray[np.float64]

    @classmethod
    def of(
        cls, shape: ModelShape, speed: DeviceSpeed, timings: Sequence[Timing], stairs: Stairs
    ) -> Self:
        tokens, rows, contexts, measured = np.array(timings, np.float64).T
        tokens = stairs.counted(tokens)
        pairs = np.array([timing.load.attended_pairs for timing in timings])
        return cls(
            measured,
            tokens,
            contexts / rows,
            tokens * (shape.flops_per_token + shape.flops_per_logit) / speed.flops,
            (shape.weight_bytes + shape.bytes_per_logit * tokens) / speed.bandwidth,
            shape.flops_per_pair * pairs / speed.flops,
            shape.bytes_per_cached_token * (contexts + tokens) / speed.bandwidth,
        )

    def seconds(self, roofline: Roofline) -> NDArray[np.float64]:
        """What a roofline says of the passes."""
        linear = np.maximum(roofline.compute.at(self.compute), roofline.memory.at(self.memory))
        attention = roofline.attention_compute * self.attention_compute
        return linear + attention + roofline.attention_memory * self.attention_memory


class _Split(NamedTuple):
    small: NDArray[np.bool_]
    """The timings that the memory branch is fitted to."""
    needed_gain: float
    """Share of the least squared error so far below which it is preferred."""


def _splits(terms: _Terms) -> Iterator[_Split]:
    """All on one branch, the expected one first; then the small on memory, the rest on compute."""
    waits = 2 * int((terms.memory >= terms.compute).sum()) >= len(terms.tokens)
    yield _Split(np.full(len(terms.tokens), waits), 1.0)
    yield _Split(np.full(len(terms.tokens), not waits), BETTER)
    for size in np.unique(terms.tokens)[MIN_BRANCH_SIZES - 1 : -MIN_BRANCH_SIZES]:
        yield _Split(terms.tokens <= size, CLEARLY_BETTER)


def _fit_split(terms: _Terms, small: NDArray[np.bool_]) -> Roofline:
    columns = [terms.compute * ~small, ~small, terms.memory * small, small]
    columns += [terms.attention_compute, terms.attention_memory]
    alpha_c, beta_c, alpha_m, beta_m, gamma_c, gamma_m = _non_negative_fit(
        np.stack(columns, 1).astype(np.float64) / terms.measured[:, None],
        np.array([*Branch(), *Branch(), 1.0, 1.0]),
    )
    return Roofline(Branch(alpha_c, beta_c), Branch(alpha_m, beta_m), gamma_c, gamma_m)


def _unidentified(roofline: Roofline, terms: _Terms) -> tuple[str, ...]:
    """The parts that say nothing in the timings."""
    compute, memory = roofline.compute, roofline.memory
    computing, waiting = compute.at(terms.compute), memory.at(terms.memory)
    idle = {
        "compute": compute == Branch() or bool((computing < waiting).all()),
        "memory": memory == Branch() or bool((computing > waiting).all()),
        "attention": len(np.unique(terms.contexts_per_row)) < MIN_BRANCH_SIZES,
    }
    return tuple(name for name, never_bound in idle.items() if never_bound)


def _non_negative_fit(design: NDArray[np.float64], prior: NDArray[np.float64]) -> tuple[float, ...]:
    """Coefficients at least 0 that bring `design @ x` nearest to 1.

    Exact: of all subsets of columns the best whose own least squares are not negative. Columns of
    zeros keep the prior.
    """
    used = [int(column) for column in np.flatnonzero(design.any(0))]
    scale = np.sqrt(np.square(design).mean(0))
    result, least_error = prior.copy(), np.inf
    for number in range(1, 1 << len(used)):
        chosen = [column for place, column in enumerate(used) if number >> place & 1]
        pull = RIDGE * np.diag(scale[chosen])
        rows = np.concatenate([design[:, chosen], pull])
        wanted = np.concatenate([np.ones(len(design)), pull @ prior[chosen]])
        found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        left_out = [column for column in used if column not in chosen]
        error = float(np.square(rows @ found - wanted).sum())
        error += float(np.square(RIDGE * scale[left_out] * prior[left_out]).sum())
        if error < least_error and (found >= 0).all():
            least_error = error
            result[used] = 0.0
            result[chosen] = found
    return tuple(float(value) for value in result)
