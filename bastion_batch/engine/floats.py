"""float32 in compiled loops, whatever the arrays hold: bfloat16 as its bits, or float32 itself."""

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError

from bastion_batch.core.compiled import instruction

_FLOAT, _BITS, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)


@instruction
def widen(_context, value):  # noqa: ANN001, ANN201
    """A stored value as float32: of bfloat16 bits, or as it is."""

    def generate(_context, builder, signature, args):  # noqa: ANN001, ANN202
        if signature.args[0] == types.float32:
            return args[0]
        bits = builder.shl(builder.zext(args[0], _BITS), _BITS(16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(_storable(value)), generate


@instruction
def narrow(_context, value, like):  # noqa: ANN001, ANN201
    """A float32 as values such as `like` are stored: to nearest, ties to even. NaN stays NaN."""

    def generate(_context, builder, signature, args):  # noqa: ANN001, ANN202
        if signature.return_type == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _BITS)
        odd = builder.and_(builder.lshr(bits, _BITS(16)), _BITS(1))
        rounded = builder.add(bits, builder.add(_BITS(0x7FFF), odd))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(is_nan, _BITS(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, _BITS(16)), _HALF)

    return _storable(like)(types.float32, like), generate


def _storable(kind):  # noqa: ANN001, ANN202 - a numba type
    if kind not in (types.uint16, types.float32):
        raise TypingError(f"{kind}: neither bfloat16 bits (uint16) nor float32")
    return kind
