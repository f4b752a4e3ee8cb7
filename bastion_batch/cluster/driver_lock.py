"""Who drives a job: `_bastion/driver.json`, so that two people do not run one job unawares.

    no file, or one that says "ended"      free
    the same machine, its process is gone  free
    the same machine                       held while it was touched within 60 s
    another machine                        held if it is touched while we look, for up to 60 s

No two machines' clocks are compared: on one machine (one boot of one kernel) the age is exact, by
the clock that starts at boot; of another machine only a change can be seen, so we watch for one.
A driver that stays quiet for a minute, or is given up by `--takeover`, loses the file to the next;
it finds that out at its next touch, and stops.

A courtesy, nothing more: two drivers of one job waste time and lose nothing.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from bastion_batch.cluster.signals import submission_id
from bastion_batch.errors import OutputError
from bastion_batch.io.store import Output, open_store

DRIVER = "_bastion/driver.json"
TOUCH_SECONDS = 15.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """One run of the job command, as `driver.json` describes it."""

    nonce: str
    """Of this run alone."""
    invocation: int
    host: str
    pid: int
    ray_job: str | None
    """The submission id, for a job that was submitted to a cluster."""
    since: str
    """UTC time at which it began, for people."""
    machine: str | None
    """One boot of one kernel: processes with the same value share a clock."""
    namespace: str | None
    """Processes of one machine with the same value see each other's process ids."""
    process_start: int | None
    """Tells the process from a later one with the same id."""
    num_touches: int = 0
    touched_at: float = 0.0
    """Seconds since the machine's boot."""
    ended: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        job = f", Ray job {self.ray_job}" if self.ray_job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def touched(self) -> "Driver":
        """The same, a moment later."""
        return replace(self, num_touches=self.num_touches + 1, touched_at=_seconds_since_boot())


def this_process(invocation: int) -> Driver:
    """The description of the calling process."""
    return Driver(
        nonce=uuid4().hex,
        invocation=invocation,
        host=socket.gethostname(),
        pid=os.getpid(),
        ray_job=submission_id(os.environ),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_line(Path("/proc/sys/kernel/random/boot_id")),
        namespace=_target(Path("/proc/self/ns/pid")),
        process_start=_process_start(os.getpid()),
    )


def read_driver(output: Output) -> Driver | None:
    """Who drives or last drove this output; None where nobody did, or the file is damaged."""
    try:
        return Driver(**json.loads(open_store(output).read(DRIVER)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def has_ended(driver: Driver | None) -> bool:
    """Whether nobody drives, by word of the last driver itself."""
    return driver is None or driver.ended


class DriverLock:
    """This process as the driver of an output. Enter to take it; leave to give it up.

    Args:
        output: of the job.
        me: this process.
        takeover: take it from whoever holds it.
        say: told when one has to wait.
        touch_seconds: between two touches.
        stale_seconds: without a touch, after which a driver is given up.
    """

    def __init__(
        self,
        output: Output,
        me: Driver,
        *,
        takeover: bool = False,
        say: Callable[[str], None] = logger.info,
        touch_seconds: float = TOUCH_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._store = open_store(output)
        self._me = me
        self._takeover = takeover
        self._say = say
        self._touch_seconds = touch_seconds
        self._stale_seconds = stale_seconds
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep_touching, name="driver", daemon=True)
        self.superseded_by: Driver | None = None
        """Who took the output over; this driver should stop."""

    def __enter__(self) -> "DriverLock":
        """Become the driver.

        Raises:
            OutputError: another one runs.
        """
        while not self._store.retries.call(self._take, what=f"taking {DRIVER}"):
            logger.debug("%s has changed meanwhile", DRIVER)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join()
        if self.superseded_by is None:
            self._touch(ended=True)

    def _take(self) -> bool:
        """Replace who is there, unless that one lives; false when the file changed meanwhile."""
        version = self._store.version(DRIVER)
        holder = read_driver(self._store)
        if holder is not None and holder.nonce == self._me.nonce:
            return True  # taken before, and the answer was lost
        if holder is not None and not self._takeover:
            age = age_of_living(holder, self._me, self._watch, self._stale_seconds)
            if age is not None:
                raise OutputError(_refusal(self._store.root, holder, age))
        self._me = self._me.touched()
        if version is None:
            return self._store.put_if_absent(DRIVER, _payload(self._me))
        return self._store.replace_if(DRIVER, _payload(self._me), version)

    def _watch(self, holder: Driver) -> float | None:
        """Look for a touch; seconds until one was seen, or None."""
        self._say(
            f"{self._store.root} was last run by {holder.name}; seeing for up to "
            f"{self._stale_seconds:.0f} s whether it still runs (--takeover does not wait)"
        )
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self._stale_seconds:
            now = read_driver(self._store)
            if now is None or now.nonce != holder.nonce or now.ended:
                return None  # `_take` sees that the file has changed
            if now.num_touches != holder.num_touches:
                return waited
            time.sleep(min(_LOOK_SECONDS, self._stale_seconds / 10))
        return None

    def _keep_touching(self) -> None:
        while self.superseded_by is None and not self._left.wait(self._touch_seconds):
            self._touch(ended=False)

    def _touch(self, *, ended: bool) -> None:
        """Say that this driver lives, or has ended, unless another one took over.

        Storage that fails is left to those for whom it matters: the next touch tries again.
        """
        self._me = replace(self._me.touched(), ended=ended)
        try:
            version = self._store.version(DRIVER)
            holder = read_driver(self._store)
            if holder is not None and holder.nonce != self._me.nonce:
                self.superseded_by = holder
            elif version is None:
                self._store.put_if_absent(DRIVER, _payload(self._me))
            else:
                self._store.replace_if(DRIVER, _payload(self._me), version)
        except OSError as error:
            logger.warning("%s/%s cannot be touched: %s", self._store.root, DRIVER, error)


def age_of_living(
    holder: Driver,
    me: Driver,
    watch: Callable[[Driver], float | None],
    stale_seconds: float,
) -> float | None:
    """Seconds since the last touch of a driver that lives, at most; None if it is gone.

    `watch` looks for a touch, where ages cannot be compared.
    """
    if holder.ended:
        return None
    if holder.machine is None or holder.machine != me.machine:
        return watch(holder)
    sees_process = holder.namespace is not None and holder.namespace == me.namespace
    if sees_process and _process_start(holder.pid) != holder.process_start:
        return None
    age = _seconds_since_boot() - holder.touched_at
    return age if age < stale_seconds else None


def _refusal(root: str, holder: Driver, age: float) -> str:
    return (
        f"output {root} is being written by another driver: {holder.name}, touched at most "
        f"{age:.0f} s ago; stop it, or add --takeover to go on in its place"
    )


def _payload(driver: Driver) -> bytes:
    return json.dumps(asdict(driver), indent=1).encode()


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where there is none, or a zombie."""
    stat = _line(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _target(path: Path) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - it names no file
    except OSError:
        return None
