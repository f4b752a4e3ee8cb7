"""Compiled loops on the threads that torch computes on.

A second set of threads, such as numba's own, would compete for the cores with torch's, which spin
between two loops. `GOMP_parallel` of the OpenMP that torch has loaded runs a function on torch's.
Where it cannot be found, the calling thread does all the work.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import carray, types
from numba.core.errors import TypingError

from bastion_batch.core.compiled import compiled, instruction

NAMES = ("libgomp", "libiomp", "libomp")
_INT, _LONG, _BYTES = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


class Team(NamedTuple):
    """Threads, and the address of what makes them run a function; 0 where there is but one."""

    num_threads: int
    starter: int


def torchs_team() -> Team:
    """As many threads as torch uses now."""
    num_threads = torch.get_num_threads()
    starter = _starter() if num_threads > 1 else 0
    return Team(num_threads if starter else 1, starter)


@cache
def _starter() -> int:
    """Address of `GOMP_parallel` in torch's OpenMP, or 0."""
    beside = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    try:
        loaded = set(Path("/proc/self/maps").read_text().split())
    except OSError:  # not Linux
        loaded = set()
    candidates = [path for path in beside if path in loaded]
    if not candidates:
        candidates = [path for path in loaded if Path(path).name.startswith(NAMES)]
    if len(candidates) != 1:
        return 0
    try:
        function = ctypes.CDLL(candidates[0]).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@instruction
def run_by_team(_context, starter, work, job, num_threads):  # noqa: ANN001, ANN201
    """Have `num_threads` threads call the function at address `work` with address `job` at once.

    Returns when all have. `starter` is `Team.starter`.
    """
    _require_integers(starter, work, job, num_threads)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _INT, _INT])
        function = builder.inttoptr(args[0], kind.as_pointer())
        pointers = [builder.inttoptr(address, _BYTES) for address in args[1:3]]
        builder.call(function, [*pointers, builder.trunc(args[3], _INT), _INT(0)])
        return args[3]

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@instruction
def take_next(_context, counter):  # noqa: ANN001, ANN201
    """The number at an address, which is raised by one: every thread gets another.

    Whoever gets a number sees what was written before a smaller one was taken.
    """
    _require_integers(counter)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        pointer = builder.inttoptr(args[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", pointer, _LONG(1), "acq_rel")

    return types.int64(types.int64), generate


@instruction
def prefetch(_context, address):  # noqa: ANN001, ANN201
    """Have the cache line at an address fetched; whether it can be does not matter."""
    _require_integers(address)

    def generate(_context, builder, _signature, args):  # noqa: ANN001, ANN202
        fetch(builder, args[0])
        return args[0]

    return types.int64(types.int64), generate


def fetch(builder: Any, address: Any) -> None:  # noqa: ANN401 - of llvmlite
    """Build what `prefetch` does."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
    to_read, soon, data = _INT(0), _INT(3), _INT(1)
    builder.call(function, [builder.inttoptr(address, _BYTES), to_read, soon, data])


@instruction
def pointer_to(_context, address, like):  # noqa: ANN001, ANN201
    """An address as a pointer to values of the type of `like`."""
    _require_integers(address)

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@compiled(inline="always")
def array_at(address, shape, like):  # noqa: ANN001, ANN201
    """The array at an address, of values of the type of `like`.

    Loops take addresses and sizes instead of arrays where they are called often: to check four
    arrays takes numba as long as a layer's small steps do.
    """
    return carray(pointer_to(address, like), shape)


def _require_integers(*kinds: types.Type) -> None:
    for kind in kinds:
        if not isinstance(kind, types.Integer):
            raise TypingError(f"{kind}: not a number or an address")
