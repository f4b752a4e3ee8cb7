"""Ray Jobs: submit, follow to the end, find, stop.

A job that is followed and one that is left alone run alike: whoever follows only reads its log.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bastion_batch.cluster.submission import OUTPUT_KEY, Submission
from bastion_batch.errors import BastionError, InputError, JobFailedError

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 300.0
"""How long a cluster that does not answer is asked again while a job is followed."""
_STOPPED_EXIT_CODE = 143
_TALKATIVE = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Ray's loggers that tell of every step of an upload."""

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """How a submitted job ended."""

    status: str
    """Ray's: SUCCEEDED, FAILED or STOPPED."""
    exit_code: int
    """The driver's own; 143 for a job that was stopped, 1 where the driver left none."""
    message: str


class RayJobs:
    """The jobs of one cluster.

    Args:
        address: of its dashboard, like `http://127.0.0.1:8265`; None: by the environment, or the
            cluster that runs on this machine.

    Raises:
        InputError: nothing answers there.
    """

    def __init__(self, address: str | None = None) -> None:
        if address is not None and not address.startswith(("http://", "https://")):
            raise InputError(
                f"address {address} is not that of a dashboard, like http://127.0.0.1:8265"
            )
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        if address is not None:
            # Ray prefers what the environment says, even to an address that is given.
            os.environ["RAY_API_SERVER_ADDRESS"] = address
        from ray.job_submission import JobSubmissionClient

        with _as_refusal(f"Ray at {address or 'the default address'} does not answer"):
            self._client: Any = JobSubmissionClient(address)  # its records have two types
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address: str = self._client.get_address()

    def submit(self, submission: Submission) -> str:
        """Upload the working directory and start the job; returns its id.

        Raises:
            InputError: Ray refuses it.
        """
        with _as_refusal("the job cannot be submitted"):
            return self._client.submit_job(
                entrypoint=submission.entrypoint,
                runtime_env=submission.runtime_env,
                metadata=submission.metadata,
            )

    def follow(self, job_id: str, write: Callable[[str], object]) -> Ended:
        """Write the job's log as it grows, whole lines, until the job has ended.

        Raises:
            JobFailedError: the cluster has not answered for minutes; the job may go on.
        """
        lines = _Lines(write)
        answered_at = time.monotonic()
        while True:
            try:
                asyncio.run(self._tail(job_id, lines))
                ended = self.ended(job_id)
                answered_at = time.monotonic()
            except _connection_errors() as error:
                logger.info("following job %s: %s; trying again", job_id, error)
                if time.monotonic() - answered_at > PATIENCE_SECONDS:
                    raise JobFailedError(
                        f"{self.address} does not answer ({error}); job {job_id} may go on"
                    ) from error
                ended = None
            if ended is not None:
                lines.close()
                return ended
            time.sleep(POLL_SECONDS)

    async def _tail(self, job_id: str, lines: "_Lines") -> None:
        log: AsyncIterator[str] = self._client.tail_job_logs(job_id)
        lines.rewind()
        async for text in log:
            lines.add(text)

    def ended(self, job_id: str) -> Ended | None:
        """How a job ended; None while it has not."""
        info = self._client.get_job_info(job_id)
        if not info.status.is_terminal():
            return None
        return Ended(info.status.value, _exit_code(info), info.message or "")

    def find(self, name: str, output: str) -> list[str]:
        """The job of this id; else the jobs that have not ended and write to this output.

        Raises:
            InputError: there is none.
        """
        with _as_refusal("the jobs cannot be listed"):
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        if any(job.submission_id == name for job in jobs):
            return [name]
        found = [
            job.submission_id
            for job in jobs
            if (job.metadata or {}).get(OUTPUT_KEY) == output and not job.status.is_terminal()
        ]
        if not found:
            raise InputError(
                f"{self.address} has no job {name}, and none that writes to {output} and runs"
            )
        return found

    def stop(self, job_id: str, *, patience_seconds: float) -> Ended | None:
        """Stop a job and wait for its end; None if it has not come in time."""
        with _as_refusal(f"job {job_id} cannot be stopped"):
            self._client.stop_job(job_id)
            deadline = time.monotonic() + patience_seconds
            while (ended := self.ended(job_id)) is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return ended


class _Lines:
    """Writes a log that may be told again from its start, once, and without carriage returns."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._num_taken = 0
        self._position = 0
        self._rest = ""

    def rewind(self) -> None:
        """The log comes again from its start."""
        self._position = 0

    def add(self, text: str) -> None:
        """Take the next piece of the log."""
        start = self._position
        self._position += len(text)
        fresh = text[max(0, self._num_taken - start) :]
        self._num_taken = max(self._num_taken, self._position)
        *lines, self._rest = (self._rest + fresh).split("\n")
        for line in lines:
            self._write(_plain(line))

    def close(self) -> None:
        """Write a last line that has no end."""
        if self._rest:
            self._write(_plain(self._rest))
        self._rest = ""


def _plain(line: str) -> str:
    """What is left of a line after its carriage returns: the last state that it showed."""
    return line.rstrip("\r").rpartition("\r")[2]


def _exit_code(info: Any) -> int:  # noqa: ANN401 - Ray's JobDetails
    if info.status.value == "SUCCEEDED":
        return 0
    if info.status.value == "STOPPED":
        return _STOPPED_EXIT_CODE
    code = info.driver_exit_code
    if code is None:
        return 1
    return 128 - code if code < 0 else code


@contextmanager
def _as_refusal(what: str) -> Generator[None]:
    """Ray's errors as one line. An error of ours stays what it is."""
    from ray.exceptions import RayError

    try:
        yield
    except BastionError:
        raise
    except (RayError, RuntimeError, ValueError, OSError) as error:
        gist = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{what}: {gist}") from error


def _connection_errors() -> tuple[type[Exception], ...]:
    import aiohttp
    import requests

    return (RuntimeError, OSError, aiohttp.ClientError, requests.RequestException)
