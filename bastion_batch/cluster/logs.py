"""One log file per process, under `_bastion/logs` of the output.

Lines are whole: a carriage return in a message becomes a space. On a local or shared disk the file
grows line by line; an object store cannot append, so there the whole file is put again every so
often, and a process that is killed loses the lines of the last while.
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from bastion_batch.io.store import LOGS, LocalStore, Output, Store, open_store

PUT_SECONDS = 10.0
_SECONDS_PER_BYTE = 1e-4
"""Longer logs are put less often: a megabyte every hundred seconds."""
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_file(output: Output, process: str) -> logging.Handler:
    """Send this package's log to `_bastion/logs/<process>.log` too."""
    store = open_store(output)
    name = f"{LOGS}/{process}.log"
    handler: logging.Handler
    if isinstance(store, LocalStore):
        handler = logging.FileHandler(store.path(name), encoding="utf-8")
    else:
        handler = _StoreHandler(store, name)
    handler.setFormatter(_WholeLines(_FORMAT))
    package = logging.getLogger("bastion_batch")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    return handler


@contextmanager
def logging_to(output: Output, process: str) -> Generator[None]:
    """`log_to_file` for the duration; afterwards logging is as it was."""
    package = logging.getLogger("bastion_batch")
    level = package.level
    # Without any other handler Python shows warnings on stderr; it still should.
    shown = [] if package.hasHandlers() or logging.lastResort is None else [logging.lastResort]
    for handler in shown:
        package.addHandler(handler)
    file = log_to_file(output, process)
    try:
        yield
    finally:
        for handler in [file, *shown]:
            package.removeHandler(handler)
        package.setLevel(level)
        file.close()


class _WholeLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """As lines that no terminal would overwrite."""
        return super().format(record).replace("\r", " ")


class _StoreHandler(logging.Handler):
    """Keeps the text, and puts it from a thread of its own."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._text = bytearray()
        self._num_put = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_putting, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._text += f"{self.format(record)}\n".encode()

    def close(self) -> None:
        """Put the rest."""
        self._closed.set()
        self._thread.join()
        super().close()

    def _keep_putting(self) -> None:
        while not self._closed.wait(PUT_SECONDS + len(self._text) * _SECONDS_PER_BYTE):
            self._put()
        self._put()

    def _put(self) -> None:
        """A log is no reason to stop: what cannot be put now is put with the next lines."""
        text = bytes(self._text)
        if len(text) == self._num_put:
            return
        with suppress(OSError):
            self._store.put(self._name, text)
            self._num_put = len(text)
