"""The versions that decide what a run does, and whether two processes have the same.

Text is only repeatable with the same code: this package's version must agree altogether, others in
their first two numbers. Smaller differences are let pass, and told.
"""

import platform
import re
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from bastion_batch import __version__
from bastion_batch.errors import InputError

COMPARED = ("bastion_batch", "python", "torch", "transformers")
NOT_INSTALLED = "not installed"


def installed_versions() -> dict[str, str]:
    """What this process has."""
    found = {"bastion_batch": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "ray", "pyarrow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found


class Differences(NamedTuple):
    """How a worker's versions differ from the driver's. Empty texts: they do not."""

    refused: str
    passed: str


def differences(driver: Mapping[str, str], worker: Mapping[str, str]) -> Differences:
    """What differs too much, and what is let pass.

    What the driver itself has not installed is not compared.
    """
    refused, passed = [], []
    for package in COMPARED:
        ours, theirs = driver[package], worker.get(package, NOT_INSTALLED)
        if ours in (theirs, NOT_INSTALLED):
            continue
        passes = package != "bastion_batch" and _first_two(ours) == _first_two(theirs)
        (passed if passes else refused).append(f"{package} {theirs} (the driver: {ours})")
    return Differences(", ".join(refused), ", ".join(passed))


def require_versions(driver: Mapping[str, str]) -> None:
    """Refuse to work for a driver whose versions are others.

    Raises:
        InputError: naming the host and the differences.
    """
    found = differences(driver, installed_versions())
    if found.refused:
        raise InputError(f"host {socket.gethostname()} has {found.refused}")


def _first_two(text: str) -> list[str]:
    return re.split(r"[.+]", text)[:2]
