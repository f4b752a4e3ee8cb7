"""How a running job shows itself: a live line on a terminal, plain lines elsewhere, a file always."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from bastion_batch.cluster.messages import Progress
from bastion_batch.cluster.worker_states import WorkerState
from bastion_batch.io.store import Output, open_store
from bastion_batch.report import duration

LINE_SECONDS = 10.0
FILE_SECONDS = 2.0
PROGRESS_FILE = "_bastion/progress.json"


class Display(Protocol):
    """Where a job says what it does. Drawing is the command line's alone."""

    def say(self, line: str) -> None:
        """Show a sentence, for good."""
        ...

    def show(self, progress: Progress) -> None:
        """Show the latest state in place of the one before."""
        ...

    def close(self) -> None:
        """Leave the screen in order."""
        ...


class NoDisplay:
    """Shows nothing: for callers of the Python interface."""

    def say(self, line: str) -> None:
        """Say nothing."""

    def show(self, progress: Progress) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to do."""


class PlainDisplay:
    """Whole lines, at most one state every ten seconds: for job logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at: float | None = None

    def say(self, line: str) -> None:
        """Write a line."""
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def show(self, progress: Progress) -> None:
        """Write the state, unless the last one is younger than ten seconds."""
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < LINE_SECONDS:
            return
        self._shown_at = now
        self.say(progress_line(progress))

    def close(self) -> None:
        """Nothing to do."""


class LiveDisplay:
    """One line that stays in place, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._line = Status("starting", console=Console(file=stream))
        self._line.start()

    def say(self, line: str) -> None:
        """Print a line above it."""
        self._line.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """Redraw the line."""
        self._line.update(Text(progress_line(progress), no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        """Stop drawing."""
        self._line.stop()


def display_for(stream: TextIO) -> Display:
    """A live display when the stream is a terminal, else plain lines."""
    return LiveDisplay(stream) if stream.isatty() else PlainDisplay(stream)


def progress_line(progress: Progress) -> str:
    """The state in one line."""
    if not progress.num_workers and not progress.num_tokens:
        return f"rows {progress.num_done:,}/{progress.num_outputs:,} | workers load the models"
    parts = [
        f"rows {progress.num_done:,}/{progress.num_outputs:,}",
        _part(progress.tokens_per_second, "{:,.0f} tokens/s"),
        _part(progress.tokens_per_step, "{:.2f} tokens/step"),
        _part(progress.speedup, "{:.2f}x plain"),
        _time_left(progress),
        _part(progress.cost, "${:,.2f}"),
        f"{progress.num_failed:,} failed" if progress.num_failed else "",
        f"{progress.num_workers} worker{'s' if progress.num_workers != 1 else ''}",
    ]
    return " | ".join(part for part in parts if part)


def _time_left(progress: Progress) -> str:
    """Until the end, and how much of it is the tail, once that is most of it."""
    if not progress.eta_seconds:
        return ""
    tail = progress.tail_seconds or 0.0
    in_tail = ", the last rows" if tail >= 0.9 * progress.eta_seconds else ""
    return f"{duration(progress.eta_seconds)} left{in_tail}"


class ProgressFile:
    """Keeps `_bastion/progress.json`: the same state and each worker's, for other programs."""

    def __init__(self, output: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = open_store(output)
        self._clock = clock
        self._written_at: float | None = None

    def write(self, progress: Progress, workers: Sequence[WorkerState] = ()) -> None:
        """Replace the file, unless it is younger than two seconds and the job goes on."""
        now = self._clock()
        recent = self._written_at is not None and now - self._written_at < FILE_SECONDS
        if recent and not progress.finished:
            return
        self._written_at = now
        state = progress._asdict() | {
            "workers": [worker._asdict() for worker in workers],
            "written_at": time.time(),
        }
        self._store.put(PROGRESS_FILE, json.dumps(state, indent=1).encode())


def _part(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)
