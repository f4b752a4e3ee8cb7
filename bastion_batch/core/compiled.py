"""Compiling loops that are too slow in Python and do not vectorise."""

import logging
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import intrinsic as _intrinsic

logger = logging.getLogger(__name__)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # noqa: ANN401
    """Compile at the first call, and keep the result for the next process where that is possible.

    Args:
        options: numba's.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:  # nowhere to write: numba says so at once
            logger.info("compiled loops are not kept: %s", error)
            return njit(**options)(function)

    return decorate


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compiled loops that is written in the compiler's own instructions.

    Args:
        function: takes the typing context and the types of the arguments, without which the loops
            call it; returns its signature and what builds it.
    """
    return _intrinsic(function)
