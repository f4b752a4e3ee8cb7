"""Trying again: what is done about an error of storage that may pass.

An error says nothing about what was done: storage may have worked and answered with an error. So
only calls that may be repeated are tried again, and who repeats one looks at what stands there.
"""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REFUSALS = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)
_REFUSAL_NUMBERS = (errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a call is tried, and how long to wait in between.

    The pause doubles from `first_seconds` up to `longest_seconds`. Half of it is waited for sure
    and the other half in part, by chance, so that many workers do not come back at once.
    """

    num_tries: int = 7
    """Calls in all, the first one included."""
    first_seconds: float = 0.5
    longest_seconds: float = 16.0
    sleep: Callable[[float], object] = time.sleep
    rng: Callable[[], float] = random.random
    """Uniform in [0, 1)."""

    def __post_init__(self) -> None:
        """Check the number of tries."""
        if self.num_tries < 1:
            raise ValueError(f"num_tries {self.num_tries} is below 1")

    def call(self, function: Callable[[], T], *, what: str) -> T:
        """The function's result, or its last error.

        Args:
            function: may be repeated, whatever an earlier call did.
            what: names the call in the log.

        Raises:
            OSError: the last try's, or a refusal, which waiting does not mend.
        """
        for pause in self._pauses():
            try:
                return function()
            except OSError as error:
                if not may_pass(error):
                    raise
                logger.warning("%s: %s; trying again in %.1f s", what, error, pause)
            self.sleep(pause)
        return function()

    def _pauses(self) -> Iterator[float]:
        pause = self.first_seconds
        for _ in range(self.num_tries - 1):
            yield pause * (0.5 + 0.5 * self.rng())
            pause = min(2 * pause, self.longest_seconds)


NO_RETRIES = Retries(num_tries=1)


def may_pass(error: OSError) -> bool:
    """Whether an error may be gone a little later: no refusal. A full disk may be emptied."""
    return not isinstance(error, _REFUSALS) and error.errno not in _REFUSAL_NUMBERS
