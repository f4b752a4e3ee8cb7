"""Ends what is left of a local Ray once its driver is gone, however that went.

When a driver is killed, Ray's agents notice within seconds that their node is dead, and then try
for a minute to tell a server that is dead, too. A small process of its own waits for the driver's
end, by the end of its standard input, gives the rest a few seconds to go by itself, and ends
whatever still has a file of the Ray session open. After an orderly end it does nothing.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 5.0
_DISMISSED = b"."


class Reaper:
    """The process that outlives the driver by a few seconds.

    Args:
        session_directory: where the Ray that was started here keeps its logs and sockets.
    """

    def __init__(self, session_directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, session_directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The Ray has been shut down in order."""
        self._process.communicate(_DISMISSED)


def users_of(directory: str) -> Iterator[int]:
    """The processes, other than this one, that have a file under a directory open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            files = (str(file.readlink()) for file in (process / "fd").iterdir())
            if process.name != str(os.getpid()) and any(f.startswith(directory) for f in files):
                yield int(process.name)


def main(session_directory: str) -> None:
    """Wait for the end of standard input, and then for the end of the session's processes."""
    if sys.stdin.buffer.read() == _DISMISSED:
        return
    deadline = time.monotonic() + GRACE_SECONDS
    while any(users_of(session_directory)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in users_of(session_directory):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(os.path.join(sys.argv[1], ""))  # noqa: PTH118 - a prefix, with the separator at its end
