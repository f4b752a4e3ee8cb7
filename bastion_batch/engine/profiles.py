"""What was learnt about a device and its models, kept from one run to the next.

One JSON file per key under the profiles directory. The key holds everything that could change what
a pass takes; it stands in the file in clear, and its digest is the file's name. A file appears
whole or not at all, so that any number of processes may load and save; the last one to save stays.
A file that is damaged, of another version or unwritable costs a warning and a new calibration.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bastion_batch import __version__
from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.device import cpu_capabilities, device_name, driver_version
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.latency import CALIBRATION_VERSION, still_holds, time_briefly
from bastion_batch.engine.model_cache import cache_dir
from bastion_batch.engine.target import Target

logger = logging.getLogger(__name__)

MAX_PROFILES = 64
"""Files kept; the longest unused go first."""

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


def profiles_dir() -> Path:
    """Where profiles are kept: ``$BASTION_BATCH_PROFILES`` or `profiles` in the cache directory."""
    configured = os.environ.get("BASTION_BATCH_PROFILES")
    return Path(configured).expanduser().absolute() if configured else cache_dir() / "profiles"


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
    path = _file_of(directory, profile.key)
    content = {"key": dict(profile.key), "costs": profile.costs, "acceptance": profile.acceptance}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_whole(path, json.dumps(content) + "\n")
        _drop_oldest(directory)
    except OSError as error:
        logger.warning("the profile cannot be saved: %s", error)
        return None
    return path


def load_profile(key: ProfileKey, directory: Path | None = None) -> Profile | None:
    """The profile of a key; None if there is none, or (logged) none that can be read."""
    path = _file_of(directory or profiles_dir(), key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("its key is another one")
        profile = Profile(key=key, costs=content["costs"], acceptance=content["acceptance"])
        path.touch()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("profile %s is ignored: %r", path, error)
        return None
    return profile


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


def _file_of(directory: Path, key: ProfileKey) -> Path:
    text = json.dumps(dict(key), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return directory / f"{digest}.json"


def _write_whole(path: Path, text: str) -> None:
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


def _drop_oldest(directory: Path) -> None:
    """Keep the most recently used files, parts that a killed process left counted too."""
    ages = []
    for path in directory.iterdir():
        try:
            ages.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process was faster
            continue
    for _, path in sorted(ages, reverse=True)[MAX_PROFILES:]:
        path.unlink(missing_ok=True)
