"""Compiling loops that are too slow in Python and do not vectorise."""

import logging
from collections.abc import Callable
from typing import Any

from numba import cfunc, njit
from numba.extending import intrinsic as _intrinsic

logger = logging.getLogger(__name__)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # noqa: ANN401
    """Compile at the first call, and keep the result for the next process where that is possible.

    Args:
        options: numba's.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return _kept(lambda keep: njit(cache=keep, **options)(function))

    return decorate


def compiled_address(signature: Any, function: Callable[..., Any]) -> int:  # noqa: ANN401
    """Compile a function for callers outside Python, and keep the result likewise.

    Args:
        signature: numba's.
        function: what to compile.

    Returns:
        where it is; it stays there.
    """
    return _kept(lambda keep: cfunc(signature, cache=keep)(function)).address


def _kept(compile_: Callable[[bool], Any]) -> Any:  # noqa: ANN401
    """Compile with a cache, or without where there is nowhere to write."""
    try:
        return compile_(True)
    except RuntimeError as error:  # numba says so at once
        logger.info("compiled loops are not kept: %s", error)
        return compile_(False)


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compiled loops that is written in the compiler's own instructions.

    What is kept of a loop is compiled anew when the loop's own file is newer, not when that of an
    instruction is: whoever changes an instruction deletes `*.nbi`.

    Args:
        function: takes the typing context and the types of the arguments, without which the loops
            call it; returns its signature and what builds it.
    """
    return _intrinsic(function)
