"""A simulated clock, and processes that take turns on it.

A process is a thread that runs only while the world waits for it, so a schedule is a function of
its seed. It gives up its turn in `Process.sleep` and `Process.wait`; there it may be killed, and
then it ends as a killed process does: nothing that it still does reaches anyone.
"""

import heapq
import threading
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from fault_store import Crash


class Violation(BaseException):
    """A promise was broken. Nothing of ours may catch it."""


class Note(NamedTuple):
    """One line of a trace. Written out only when somebody reads it: most are never read."""

    now: float
    who: str
    what: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.now:9.3f} {self.who:<10} {' '.join(map(str, self.what))}"


class World:
    """Runs events in order of time, and of their making where the times are equal."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.scale = 1.0
        """Of the durations that `later` draws."""
        self.violation: Violation | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self.noted: list[Note] = []
        """All that happened, in order."""
        self._processes: list[Process] = []

    @property
    def has_living(self) -> bool:
        """Whether a process has not ended."""
        return any(process.alive for process in self._processes)

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def soon(self, mean: float) -> float:
        """A random duration."""
        return self.random.expovariate(1.0 / mean)

    def later(self, mean: float) -> float:
        """A random duration, scaled."""
        return self.soon(mean * self.scale)

    def at(self, delay: float, function: Callable[[], None]) -> None:
        """Call a function so many seconds from now."""
        self.at_time(self.now + delay, function)

    def at_time(self, time: float, function: Callable[[], None]) -> None:
        """Call a function at a moment that is not past."""
        self._num_planned += 1
        heapq.heappush(self._events, (time, self._num_planned, function))

    def note(self, who: str, *what: object) -> None:
        """Add a line to the trace."""
        self.noted.append(Note(self.now, who, what))

    def trace(self) -> str:
        """Everything that was noted."""
        return "\n".join(map(str, self.noted))

    def spawn(self, name: str, body: "Callable[[Process], None]") -> "Process":
        """Start a process now."""
        process = Process(self, name, body)
        self._processes.append(process)
        self.at(0.0, process.resume)
        return process

    def run(self, finished: Callable[[], bool], max_seconds: float) -> None:
        """Run events until the job is finished, in no more than so many simulated seconds.

        Raises:
            Violation: a promise was broken, or there is no end.
        """
        while not finished():
            if not self._events or self.now > max_seconds:
                raise Violation("the job does not end")
            self.now, _, function = heapq.heappop(self._events)
            function()
            if self.violation is not None:
                raise self.violation

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()


class Process:
    """A thread that runs while the world waits for it."""

    def __init__(self, world: World, name: str, body: "Callable[[Process], None]") -> None:
        self.name = name
        self.alive = True
        self.error: BaseException | None = None
        """What it ended with, unless it was killed."""
        self.on_end: Callable[[], None] = lambda: None
        self._world = world
        self._body = body
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._pause = 0
        self._doomed = False
        self._thread = threading.Thread(target=self._main, daemon=True, name=name)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this process."""
        return threading.current_thread() is self._thread

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self.wait(seconds, lambda: False)

    def wait(self, seconds: float, ready: Callable[[], bool]) -> bool:
        """Let others run until something is ready, which `wake` must tell, or for so long."""
        deadline = self._world.now + seconds
        self.check_alive()
        while not ready() and self._world.now < deadline:
            self._resume_later(deadline - self._world.now)
            self._back.release()
            self._go.acquire()
            self.check_alive()
        return ready()

    def wake(self) -> None:
        """End its wait, if it is in one."""
        self._resume_later(0.0)

    def resume(self) -> None:
        """Let it run until its next pause. Called by the world."""
        if self.alive:
            self._go.release()
            self._back.acquire()
            if not self.alive:
                self._thread.join()
                self.on_end()

    def kill(self) -> None:
        """End it where it pauses. Not to be called by itself."""
        if self.alive:
            self._world.note(self.name, "is killed")
            self._doomed = True
            self.resume()

    @property
    def ended_in_order(self) -> bool:
        """Whether it has ended by itself, with no error."""
        return not self.alive and not self._doomed and self.error is None

    def check_alive(self) -> None:
        """Raise `Crash` in a process that is dying: what it still asks for is not done."""
        if self._doomed:
            raise Crash(self.name)

    def die(self) -> None:
        """From now on it is dead; called by itself before it raises `Crash`."""
        self._doomed = True

    def _resume_later(self, delay: float) -> None:
        self._pause += 1
        number = self._pause

        def resume() -> None:
            if number == self._pause:
                self.resume()

        self._world.at(delay, resume)

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._doomed:
                self._body(self)
        except Crash:
            pass
        except Violation as violation:
            self._world.violation = violation
        except Exception as error:  # noqa: BLE001 - any error ends a process, and is its account
            self.error = error
        finally:
            self.alive = False
            self._back.release()
