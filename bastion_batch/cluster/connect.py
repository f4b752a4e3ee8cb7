"""Which Ray a job runs on: the caller's, the cluster's that is there, or a local one of its own.

Ray's own order is followed: a `ray.init` of the caller, then `RAY_ADDRESS`, then the cluster that
`ray start` began on this machine, and otherwise a local Ray that ends with this process. What was
not started here is never shut down. Ray is imported late, because its settings come from the
environment.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bastion_batch.cluster.reaper import Reaper
from bastion_batch.errors import InputError

NAMESPACE = "bastion_batch"
RUN_VARIABLE = "BASTION_BATCH_RUN_ID"
"""Environment variable by which every process of a run can be found."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Leases and counts are all that crosses a local Ray: near the smallest store it accepts."""

logger = logging.getLogger(__name__)


def in_uploaded_working_dir(directory: Path) -> bool:
    """Whether this directory is Ray's cached copy of a submitted job's working directory.

    Ray unpacks it as `<session>/runtime_resources/working_dir_files/_ray_pkg_<hash>`.
    """
    return ("runtime_resources", "working_dir_files") in pairwise(directory.parts)


@contextmanager
def connected(num_cpus: int, run: str) -> Generator[bool]:
    """Have a Ray for the duration, with this many CPUs if it has to be started.

    Yields whether it was started here: then every process of it is of this `run` and says so.

    Raises:
        InputError: the address given does not answer, or is a Ray Client address.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        _refuse_ray_client()
        logger.info("using the Ray that this process is connected to")
        yield False
        return
    address = cluster_address()
    reaper = None
    try:
        if address is None:
            os.environ[RUN_VARIABLE] = run
            reaper = Reaper(_start_local(num_cpus))
        else:
            _join(address)
        yield address is None
    finally:
        import ray

        ray.shutdown()  # disconnects; ends only what was started above
        if reaper is not None:
            reaper.dismiss()
        os.environ.pop(RUN_VARIABLE, None)


def _refuse_ray_client() -> None:
    from ray.util.client import ray as client

    if client.is_connected():
        raise InputError(
            "this process is connected by Ray Client (ray://), which is not supported: submit the "
            "job with `ray job submit`, or run on a node of the cluster"
        )


def cluster_address() -> str | None:
    """The address of the cluster to join, or None to start a local Ray.

    Raises:
        InputError: `RAY_ADDRESS` names a cluster that cannot be used.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if given.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS {given} is a Ray Client address, which is not supported: submit the job "
            "with `ray job submit`, or run on a node of the cluster"
        )
    if given.startswith("http"):
        raise InputError(
            f"RAY_ADDRESS {given} is where `ray job submit` goes: use that command, or unset it"
        )
    if given == "local":
        return None
    if given and given != "auto":
        if not _answers(given):
            raise InputError(f"RAY_ADDRESS {given}: no Ray answers there")
        return given
    started = _started_on_this_machine()
    if started and _answers(started):
        return started
    if started:
        logger.warning("no Ray answers at %s any more; starting a local one", started)
    elif given == "auto":
        raise InputError("RAY_ADDRESS is auto, but no Ray cluster runs on this machine")
    return None


def _started_on_this_machine() -> str | None:
    """The address that the last `ray start` on this machine wrote down."""
    directory = Path(os.environ.get("RAY_TMPDIR") or "/tmp")  # Ray's own default
    try:
        return (directory / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"Ray address {address} is not of the form host:port")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3.0):
            return True
    except OSError:
        return False


def _join(address: str) -> None:
    import ray

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError) as error:
        raise InputError(f"Ray at {address} cannot be joined: {error}") from error
    logger.info("joined the Ray cluster at %s", address)


def _start_local(num_cpus: int) -> str:
    """Start a Ray for this process; returns its session directory."""
    for name, value in _local_environment().items():
        os.environ.setdefault(name, value)
    import ray

    with _importable_by_workers():
        started: Any = ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    logger.info("started a local Ray")
    return started.address_info["session_dir"]


def _local_environment() -> dict[str, str]:
    """What a local Ray is told, unless the user told it something else."""
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a CPU actor may see the GPUs; no warning
    }
    if "ray" not in sys.modules and not os.environ.get("RAY_AUTH_MODE"):
        # A token of this run alone: Ray's default would write one to the home directory and warn.
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return settings


@contextmanager
def _importable_by_workers() -> Generator[None]:
    """Let the processes started meanwhile import the very package that this one runs."""
    before = os.environ.get("PYTHONPATH")
    package_root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([package_root, *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
