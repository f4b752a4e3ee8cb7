"""What was learnt about a device and its models, kept from one run to the next.

One file per key in the profiles directory (`keyed_files`). The key holds everything that could
change what a pass takes. Any number of processes may load and save; the last one to save stays. A
file that is damaged, of another version or unwritable costs a warning and a new calibration.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bastion_batch import __version__
from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.device import cpu_capabilities, device_name, driver_version
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.keyed_files import file_of, profiles_dir, put
from bastion_batch.engine.latency import CALIBRATION_VERSION, still_holds, time_briefly
from bastion_batch.engine.target import Target

logger = logging.getLogger(__name__)

ProfileKey = Mapping[str, str | int | None]
"""What a profile depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one engine learnt."""

    key: ProfileKey
    costs: Mapping[str, Any]
    """`StepCosts.to_dict`."""
    acceptance: Mapping[str, Any] | None = None
    """`AcceptanceModel.to_dict`; None if nothing was drafted."""


class ProfileStore(Protocol):
    """Where profiles are kept. Neither call fails: what goes wrong is a warning."""

    def load(self, key: ProfileKey) -> Profile | None:
        """The profile of a key, if there is one."""
        ...

    def save(self, profile: Profile) -> None:
        """Keep a profile, in place of an older one of the same key."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryProfiles:
    """Profiles in a directory; in `profiles_dir` if none is given."""

    directory: Path | None = None

    def load(self, key: ProfileKey) -> Profile | None:
        """See `load_profile`."""
        return load_profile(key, self.directory)

    def save(self, profile: Profile) -> None:
        """See `save_profile`."""
        save_profile(profile, self.directory)


def profile_key(
    target: Target,
    target_digest: str,
    drafter_digest: str | None,
    *,
    attention: str = "sdpa",
    execution: str = "eager",
) -> ProfileKey:
    """The key of an engine.

    Args:
        target: loaded; says device and dtype.
        target_digest: fingerprint of its files.
        drafter_digest: of the drafter's; None without one.
        attention: the attention backend.
        execution: how passes are run.
    """
    return {
        "device": device_name(target.device),
        "driver": driver_version(target.device),
        "cpu": cpu_capabilities(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target_digest,
        "drafter": drafter_digest,
        "attention": attention,
        "execution": execution,
        "torch": torch.__version__,
        "bastion_batch": __version__,
        "calibration": CALIBRATION_VERSION,
    }


def save_profile(profile: Profile, directory: Path | None = None) -> Path | None:
    """Write a profile, in place of an older one of the same key, and return its file.

    A failure is logged, and None returned.
    """
    directory = directory or profiles_dir()
    path = file_of(directory, profile.key)
    try:
        put(path, encode(profile))
    except OSError as error:
        logger.warning("the profile cannot be saved: %s", error)
        return None
    return path


def load_profile(key: ProfileKey, directory: Path | None = None) -> Profile | None:
    """The profile of a key; None if there is none, or (logged) none that can be read."""
    path = file_of(directory or profiles_dir(), key)
    try:
        profile = decode(path.read_bytes(), key, str(path))
        path.touch()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("profile %s is ignored: %r", path, error)
        return None
    return profile


def encode(profile: Profile) -> str:
    """The content of a profile's file."""
    content = {"key": dict(profile.key), "costs": profile.costs, "acceptance": profile.acceptance}
    return json.dumps(content) + "\n"


def decode(content: bytes, key: ProfileKey, name: str) -> Profile | None:
    """The profile in a file of this name; None, with a warning, if it is no profile of the key."""
    try:
        values = json.loads(content.decode())
        if values["key"] != key:
            raise ValueError("its key is another one")
        return Profile(key=key, costs=values["costs"], acceptance=values["acceptance"])
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("profile %s is ignored: %r", name, error)
        return None


def costs_of(profile: Profile, target: Target, drafter: Drafter | None) -> StepCosts | None:
    """The costs in a profile, if two short timings agree that they still hold on this device.

    Costs that are off by one factor are scaled by it. None if they are off otherwise, or (logged)
    cannot be read: calibrate then.
    """
    shape = drafter.shape if drafter else None
    try:
        costs = StepCosts.from_dict(target.shape, shape, profile.costs)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("the costs in a profile are ignored: %r", error)
        return None
    return costs if still_holds(costs, time_briefly(target, drafter)) else None


def acceptance_of(profile: Profile, max_depth: int) -> AcceptanceModel | None:
    """The acceptance model in a profile; None if it has none, or (logged) none that can be read."""
    if profile.acceptance is None:
        return None
    try:
        return AcceptanceModel.from_dict(max_depth, profile.acceptance)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        logger.warning("the acceptance in a profile is ignored: %r", error)
        return None
