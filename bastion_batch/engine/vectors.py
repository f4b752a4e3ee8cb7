"""Products of up to four queries with the keys and values of a row, in the compiler's vectors.

Written out because a compiler that vectorises loops by itself sums every product across its lanes
alone, widens bfloat16 by shuffles and keeps sums in memory. Here the products of four queries with
four keys are summed across lanes together, a 32-bit word of two bfloat16 numbers is widened by a
shift and a mask, and sums stay in registers. A target without such vectors gets them cut in parts
by the compiler.

Queries and sums lie as words do: `[0, 2, 4, ..., 1, 3, 5, ...]` of a head in bfloat16, see `lane_of`;
as they are in float32.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError

from bastion_batch.core.compiled import instruction
from bastion_batch.engine.team import fetch

NUM_QUERIES = NUM_KEYS = 4
"""At a time: as many products as a vector has lanes. Arrays are padded to a multiple of it."""
LANES = 16
_VECTOR_BYTES = 4 * LANES
PARTS = 2
"""Vectors of values that are computed together."""
STEP = PARTS * LANES
"""Values that are computed together: a head's size is a multiple of it."""
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


@instruction
def lane_of(_context, d, size_d, like):  # noqa: ANN001, ANN201
    """Where value `d` of a head of `size_d` lies in a query or a sum."""

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        d, size_d, _ = args
        if like == types.float32:
            return d
        half = builder.lshr(size_d, _LONG(1))
        is_odd = builder.and_(d, _LONG(1))
        return builder.add(builder.lshr(d, _LONG(1)), builder.mul(is_odd, half))

    return types.uint64(types.uint64, types.uint64, like), generate


@instruction
def score_block(  # noqa: ANN201
    _context, queries, query_bytes, num_queries, key, key_bytes, num_keys, size_d,  # noqa: ANN001
    scores, score_bytes, like  # noqa: ANN001
):  # fmt: skip
    """Products of up to four queries, `query_bytes` apart, with four keys, `key_bytes` apart.

    Where there are fewer than four keys, the last one's are given again; where there are fewer than
    four queries, zeros. The four of a query are stored side by side, the next query's `score_bytes`
    further. Arguments are addresses and sizes; `like` is a stored value.
    """
    layout = Layout.of(like)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        queries, query_bytes, num_queries, key, key_bytes, num_keys, size_d = args[:7]
        scores, score_bytes, _ = args[7:]
        keys = []
        for k in range(NUM_KEYS):
            is_there = builder.icmp_signed("<", _LONG(k), num_keys)
            place = builder.select(is_there, _LONG(k), builder.sub(num_keys, _LONG(1)))
            keys.append(builder.add(key, builder.mul(key_bytes, place)))
        sums_QK = [[_zeroed(builder) for _ in keys] for _ in range(NUM_QUERIES)]
        for count in _counts(builder, num_queries):
            with cgutils.for_range(builder, builder.udiv(size_d, _LONG(STEP))) as loop:
                places = layout.places(builder, size_d, loop.index)
                values_QP = []
                for q in range(count):
                    query = builder.add(queries, builder.mul(query_bytes, _LONG(q)))
                    values_QP.append(
                        [_load(builder, _FLOATS, builder.add(query, p)) for p in places]
                    )
                for k, at in enumerate(keys):
                    parts = layout.values(builder, at, loop.index)
                    for values_P, sums_K in zip(values_QP, sums_QK[:count], strict=True):
                        for values, part in zip(values_P, parts, strict=True):
                            _add_product(builder, sums_K[k], values, part)
        totals = [builder.load(total) for sums_K in sums_QK for total in sums_K]
        across = _across_lanes(builder, totals)
        for q in range(NUM_QUERIES):
            lanes = [_INT(NUM_KEYS * q + k) for k in range(NUM_KEYS)]
            kind = ir.VectorType(_FLOAT, NUM_KEYS)
            pick = ir.Constant(ir.VectorType(_INT, NUM_KEYS), lanes)
            own = builder.shuffle_vector(across, across, pick)
            at = builder.add(scores, builder.mul(score_bytes, _LONG(q)))
            builder.store(own, builder.inttoptr(at, kind.as_pointer()), align=4)
        return key

    return types.int64(*[types.int64] * 9, like), generate


@instruction
def add_weighted_four(  # noqa: ANN201
    _context, weights, weight_bytes, num_queries, value, value_bytes, ahead, num_values,  # noqa: ANN001
    sums, size_d, like  # noqa: ANN001
):  # fmt: skip
    """Weighted sums of `num_values` values, `value_bytes` apart, for up to four queries.

    The weights of a query lie side by side, those of the next `weight_bytes` further; the sums of
    the queries follow each other. With each value, what lies `ahead` bytes further is fetched.
    """
    layout = Layout.of(like)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        weights, weight_bytes, num_queries, value, value_bytes = args[:5]
        ahead, num_values, sums, size_d, _ = args[5:]

        def add(steps: list[Any], count: int) -> None:
            """The sums of some steps of the head."""
            sums_QP = [[_zeroed(builder) for _ in range(PARTS * len(steps))] for _ in range(count)]
            with cgutils.for_range(builder, num_values) as loop:
                at = builder.add(value, builder.mul(loop.index, value_bytes))
                parts = []
                for step in steps:
                    layout.fetch(builder, builder.add(at, ahead), step)
                    parts += layout.values(builder, at, step)
                weight_at = builder.add(weights, builder.mul(loop.index, _LONG(4)))
                for q, sums_P in enumerate(sums_QP):
                    at = builder.add(weight_at, builder.mul(weight_bytes, _LONG(q)))
                    weight = everywhere(builder, _load(builder, _FLOAT, at))
                    for total, part in zip(sums_P, parts, strict=True):
                        _add_product(builder, total, weight, part)
            places = [place for step in steps for place in layout.places(builder, size_d, step)]
            for q, sums_P in enumerate(sums_QP):
                first = builder.add(sums, builder.mul(size_d, _LONG(4 * q)))
                for total, place in zip(sums_P, places, strict=True):
                    pointer = builder.inttoptr(builder.add(first, place), _FLOATS.as_pointer())
                    builder.store(builder.load(total), pointer, align=4)

        num_steps = builder.udiv(size_d, _LONG(STEP))
        for count in _counts(builder, num_queries):
            with cgutils.for_range(builder, builder.udiv(num_steps, _LONG(2))) as pair:
                step = builder.mul(pair.index, _LONG(2))
                add([step, builder.add(step, _LONG(1))], count)
            with builder.if_then(builder.trunc(num_steps, ir.IntType(1))):
                add([builder.sub(num_steps, _LONG(1))], count)
        return value

    return types.int64(*[types.int64] * 9, like), generate


def _counts(builder: Any, num_queries: Any) -> Iterator[int]:  # noqa: ANN401
    """Every number of queries, each while building what is done if there are so many."""
    for count in range(1, NUM_QUERIES + 1):
        with builder.if_then(builder.icmp_signed("==", num_queries, _LONG(count))):
            yield count


class Layout(NamedTuple):
    """How stored values are read a step at a time, and where they lie in queries and sums."""

    is_narrow: bool

    @classmethod
    def of(cls, like: Any) -> "Layout":  # noqa: ANN401 - a numba type
        """Of values of this type."""
        if like not in (types.uint16, types.float32):
            raise TypingError(f"{like}: neither bfloat16 bits (uint16) nor float32")
        return cls(like == types.uint16)

    def values(self, builder: Any, first: Any, step: Any) -> list[Any]:  # noqa: ANN401
        """The vectors of a step of what is stored from address `first`: if narrow, even and odd."""
        if not self.is_narrow:
            at = builder.add(first, builder.mul(step, _LONG(PARTS * _VECTOR_BYTES)))
            return [
                _load(builder, _FLOATS, builder.add(at, _LONG(part * _VECTOR_BYTES)))
                for part in range(PARTS)
            ]
        at = builder.add(first, builder.mul(step, _LONG(_VECTOR_BYTES)))
        words = _load(builder, _INTS, at)
        even = builder.shl(words, ir.Constant(_INTS, [16] * LANES))
        odd = builder.and_(words, ir.Constant(_INTS, [-0x10000] * LANES))
        return [builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)]

    def fetch(self, builder: Any, first: Any, step: Any) -> None:  # noqa: ANN401
        """Have the lines of a step of what is stored from address `first` brought near."""
        num_lines = 1 if self.is_narrow else PARTS
        at = builder.add(first, builder.mul(step, _LONG(num_lines * _VECTOR_BYTES)))
        for line in range(num_lines):
            fetch(builder, builder.add(at, _LONG(line * _VECTOR_BYTES)))

    def places(self, builder: Any, size_d: Any, step: Any) -> list[Any]:  # noqa: ANN401
        """Offsets in bytes of those vectors in a query or a sum."""
        if not self.is_narrow:
            at = builder.mul(step, _LONG(PARTS * _VECTOR_BYTES))
            return [builder.add(at, _LONG(part * _VECTOR_BYTES)) for part in range(PARTS)]
        at = builder.mul(step, _LONG(_VECTOR_BYTES))
        return [at, builder.add(at, builder.mul(size_d, _LONG(2)))]


def _zeroed(builder: Any) -> Any:  # noqa: ANN401
    """A vector that ends in a register, zero from here on."""
    place = cgutils.alloca_once(builder, _FLOATS)
    builder.store(ir.Constant(_FLOATS, None), place)
    return place


def _load(builder: Any, kind: ir.Type, address: Any) -> Any:  # noqa: ANN401
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _add_product(builder: Any, place: Any, left: Any, right: Any) -> None:  # noqa: ANN401
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    add_product = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    builder.store(builder.call(add_product, [left, right, builder.load(place)]), place)


def everywhere(builder: Any, number: Any) -> Any:  # noqa: ANN401
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _across_lanes(builder: Any, vectors: list[Any]) -> Any:  # noqa: ANN401
    """The sums of as many vectors as there are lanes, one in each lane.

    Neighbours are added over and over: of two vectors at a time, into one of half as many lanes each.
    """
    even = ir.Constant(_INTS, list(range(0, 2 * LANES, 2)))
    odd = ir.Constant(_INTS, list(range(1, 2 * LANES, 2)))
    while len(vectors) > 1:
        vectors = [
            builder.fadd(
                builder.shuffle_vector(left, right, even), builder.shuffle_vector(left, right, odd)
            )
            for left, right in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]
