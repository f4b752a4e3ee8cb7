"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends the process."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


def interruption(signum: int) -> BaseException:
    """What Python raises for this signal by custom: exit code 130 or 143."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


class StopSignals:
    """While entered, the first signal raises at once, or only sets `received` while `deferred`.

    Outside the main thread, where Python allows no handlers, signals are left alone.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self.deferred = False
        self._say = say
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
            self.rearm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def rearm(self) -> None:
        """Install the handlers again: `ray.init` replaces that of SIGTERM."""
        for signum in self._previous:
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + signum)
        self.received = signum
        if not self.deferred:
            raise interruption(signum)
        self._say("stopping; once more ends at once")
