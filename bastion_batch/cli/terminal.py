"""What every command writes to the terminal with."""

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import typer


def say(line: str) -> None:
    """Write a line that is not the command's result."""
    typer.echo(line, err=True)


def command_name() -> str:
    """How this program is called; `python -m` calls it by its file."""
    name = Path(sys.argv[0]).name
    return "bastion-batch" if name == "__main__.py" else name


class _SayHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Generator[None]:
    """Show this package's warnings among the other lines."""
    handler = _SayHandler(say)
    package = logging.getLogger("bastion_batch")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
