"""Building an engine where memory is short: with fewer rows, or an error that says what to do.

Another process may hold a device's memory for a while, so the error is one that a later start of
the worker may not meet; a worker that meets it three times is given up.
"""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from bastion_batch.errors import BastionError, JobFailedError

EngineType = TypeVar("EngineType")
Rows = int | Literal["auto"]

FEWER_ROWS = (16, 4, 1)
"""What is tried after `auto`, which means as many as pay and should fit."""

logger = logging.getLogger(__name__)


def build_within_memory(build: Callable[[Rows], EngineType], max_batch: Rows) -> EngineType:
    """The engine for `max_batch` rows, or for as many as memory allows.

    Raises:
        JobFailedError: not even one row fits.
    """
    shortage = ""
    for rows in _rows_to_try(max_batch):
        if shortage:
            logger.warning("memory is short: %s; trying with %s rows", shortage, rows)
        try:
            return build(rows)
        except (MemoryError, RuntimeError, ValueError) as error:
            if not is_shortage(error):
                raise
            shortage = next(iter(str(error).splitlines()), type(error).__name__)
        _let_go()
    raise JobFailedError(
        f"memory does not hold the models and one row: {shortage}; is another process using the "
        "device? Otherwise use a smaller target, fewer workers on the machine, or bfloat16"
    )


def is_shortage(error: Exception) -> bool:
    """Whether an engine could not be built for want of memory.

    A `ValueError` of an engine says that memory does not hold its largest pass.
    """
    if isinstance(error, BastionError):
        return False
    if isinstance(error, ValueError):
        return str(error).startswith("memory of ")
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in text
        or "can't allocate memory" in text
    )


def _rows_to_try(max_batch: Rows) -> Iterator[Rows]:
    yield max_batch
    if max_batch == "auto":
        yield from FEWER_ROWS
        return
    while max_batch > 1:
        max_batch //= 2
        yield max_batch


def _let_go() -> None:
    """Free what the failed engine held."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
