"""The exponential function and the softmax in the compiler's vectors.

A call of the library's `exp` keeps a loop from being vectorised, and what compilers vectorise by
themselves is half as wide.
"""

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from bastion_batch.core.compiled import instruction
from bastion_batch.engine.vectors import LANES, PARTS, Layout, everywhere

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_LEAST = -87.0
"""Below it there are no normal numbers."""
_LOG2 = (0.693359375, -2.12194440e-4)
"""The natural logarithm of 2 in two parts: n times the first is exact."""
_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


@instruction
def exponential(_context, x):  # noqa: ANN001, ANN201
    """`exp(x)` of a float32 up to 0, within 3e-7 of it; NaN stays NaN."""

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        return _exp(builder, args[0])

    return types.float32(types.float32), generate


@instruction
def largest_of(_context, scores, num_vectors):  # noqa: ANN001, ANN201
    """The largest of the float32 numbers from an address on; NaN do not count.

    There are `num_vectors` times `LANES` of them.
    """

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        most = _least(builder)
        with cgutils.for_range(builder, args[1]) as loop:
            values = _load(builder, args[0], loop.index)
            builder.store(_larger(builder, values, builder.load(most)), most)
        return _over_lanes(builder, builder.load(most), _larger)

    return types.float32(types.int64, types.int64), generate


@instruction
def largest_stored(_context, values, num_steps, like):  # noqa: ANN001, ANN201
    """The same of values that are stored as `like` is: `num_steps` times `STEP` of them."""
    layout = Layout.of(like)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        parts = [_least(builder) for _ in range(PARTS)]
        with cgutils.for_range(builder, args[1]) as loop:
            for most, part in zip(parts, layout.values(builder, args[0], loop.index), strict=True):
                builder.store(_larger(builder, part, builder.load(most)), most)
        most, *others = (builder.load(part) for part in parts)
        for other in others:
            most = _larger(builder, other, most)
        return _over_lanes(builder, most, _larger)

    return types.float32(types.int64, types.int64, like), generate


@instruction
def exponentials(_context, scores, num_vectors, most):  # noqa: ANN001, ANN201
    """Replace so many vectors of scores by `exp(score - most)`; returns their sum."""

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        scores, num_vectors, most = args
        most = everywhere(builder, most)
        total = cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None))
        with cgutils.for_range(builder, num_vectors) as loop:
            values = _load(builder, scores, loop.index)
            weights = _exp(builder, builder.fsub(values, most))
            builder.store(weights, _vector(builder, scores, loop.index), align=4)
            builder.store(builder.fadd(builder.load(total), weights), total)
        return _over_lanes(builder, builder.load(total), lambda b, left, right: b.fadd(left, right))

    return types.float32(types.int64, types.int64, types.float32), generate


def _exp(builder: Any, x: Any) -> Any:  # noqa: ANN401
    """Of a number or a vector: 2**n times a polynomial in what remains."""
    like = x.type
    least, half, per_log2 = (_constant(like, value) for value in (_LEAST, 0.5, 1.44269504))
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    n = _called(builder, "floor", [_called(builder, "fmuladd", [x, per_log2, half])])
    f = x
    for part in _LOG2:
        f = _called(builder, "fmuladd", [n, _constant(like, -part), f])
    p = _constant(like, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p = _called(builder, "fmuladd", [p, f, _constant(like, coefficient)])
    integer = _INT if like == _FLOAT else ir.VectorType(_INT, LANES)
    power = builder.add(builder.fptosi(n, integer), _whole(integer, 127))
    scale = builder.bitcast(builder.shl(power, _whole(integer, 23)), like)
    return builder.fmul(p, scale)


def _called(builder: Any, name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401
    """An intrinsic of the compiler on numbers or vectors."""
    like = args[0].type
    suffix = "f32" if like == _FLOAT else f"v{LANES}f32"
    kind = ir.FunctionType(like, [like] * len(args))
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix}"), args
    )


def _constant(like: ir.Type, value: float) -> ir.Constant:
    single = ir.Constant(_FLOAT, value)
    return single if like == _FLOAT else ir.Constant(like, [single] * LANES)


def _whole(like: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(like, value if like == _INT else [value] * LANES)


def _lanes(places: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_INT, len(places)), places)


def _vector(builder: Any, first: Any, index: Any) -> Any:  # noqa: ANN401
    """Pointer to a vector of those that lie from an address on."""
    at = builder.add(first, builder.mul(index, _LONG(4 * LANES)))
    return builder.inttoptr(at, _FLOATS.as_pointer())


def _load(builder: Any, first: Any, index: Any) -> Any:  # noqa: ANN401
    return builder.load(_vector(builder, first, index), align=4)


def _larger(builder: Any, value: Any, most: Any) -> Any:  # noqa: ANN401
    """Of numbers or vectors; `most` where a value is NaN."""
    return builder.select(builder.fcmp_ordered(">", value, most), value, most)


def _least(builder: Any) -> Any:  # noqa: ANN401
    """A vector that ends in a register, below all numbers from here on."""
    return cgutils.alloca_once_value(builder, _constant(_FLOATS, -math.inf))


def _over_lanes(builder: Any, vector: Any, joined: Any) -> Any:  # noqa: ANN401
    """All lanes of a vector joined into one number, half with half."""
    size = LANES
    while size > 1:
        size //= 2
        lower, upper = (
            builder.shuffle_vector(vector, vector, _lanes(list(range(first, first + size))))
            for first in (0, size)
        )
        vector = joined(builder, lower, upper)
    return builder.extract_element(vector, _INT(0))
