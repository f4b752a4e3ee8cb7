"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends the process."""

import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType

DRAIN_SECONDS = 20.0
"""Clusters give 30 s before they kill; an orderly end rarely takes more than three."""
RAY_STOP_SECONDS = 3.0
"""What `ray job stop` gives, unless it is told otherwise."""
HANG_SECONDS = 10.0
"""What an orderly end may take beyond its drain, before something it waits for must be dead."""
_RAY_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def drain_seconds(environment: Mapping[str, str]) -> float:
    """How long an orderly end may take in a process with this environment."""
    given = environment.get(_RAY_STOP_WAIT)
    if given is None and submission_id(environment) is None:
        return DRAIN_SECONDS
    try:
        wait = float(given) if given else RAY_STOP_SECONDS
    except ValueError:
        wait = RAY_STOP_SECONDS
    return max(1.0, wait - 1.0)


def submission_id(environment: Mapping[str, str]) -> str | None:
    """The name of the Ray job whose driver has this environment."""
    try:
        config = json.loads(environment.get(_RAY_JOB_CONFIG, "{}"))
        return config.get("metadata", {}).get("job_submission_id")
    except ValueError:
        return None


def interruption(signum: int) -> BaseException:
    """What Python raises for this signal by custom: exit code 130 or 143."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


def notice_exit() -> BaseException:
    """How a job ends that was given notice: as if by SIGTERM."""
    return interruption(signal.SIGTERM)


class StopSignals:
    """While entered, the first signal raises at once, or only sets `received` while `deferred`.

    Outside the main thread, where Python allows no handlers, signals are left alone.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self.deferred = False
        self.say = say
        self._previous: dict[int, object] = {}
        self._limit: tuple[float, Callable[[], None]] | None = None

    @contextmanager
    def end_within(self, seconds: float, at_last: Callable[[], None]) -> Generator[None]:
        """Once a signal has come, be out of this block in so many seconds.

        Otherwise `at_last` is called and the process ends with the signal's exit code. A signal
        often goes to all processes of a machine or a group, Ray's too, and a call into a Ray that
        is dead may last a minute and then end the process with a code of its own.
        """
        self._limit = seconds, at_last
        try:
            yield
        finally:
            self._limit = None

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
        if self._limit is not None:
            self._end_late(signum, *self._limit)
        if not self.deferred:
            raise interruption(signum)
        self.say("stopping; once more ends at once")

    def _end_late(self, signum: int, seconds: float, at_last: Callable[[], None]) -> None:
        def end() -> None:
            if self._limit is not None:
                self.say(f"the end took longer than {seconds:.0f} s; ending without it")
                at_last()
                os._exit(128 + signum)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
