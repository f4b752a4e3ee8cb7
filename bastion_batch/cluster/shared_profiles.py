"""Profiles that the workers of a job share, so that of equal devices one alone is measured.

They lie in the output, or where `workers.profiles` says. A worker looks first on its own machine.
What it measures itself it adds to the shared ones, and keeps that up to date; a profile that it
found there stays its maker's, so that a thousand workers do not write one name.
"""

import logging

from bastion_batch.config import JobConfig
from bastion_batch.engine.keyed_files import file_name
from bastion_batch.engine.profiles import (
    DirectoryProfiles,
    Profile,
    ProfileKey,
    ProfileStore,
    decode,
    encode,
)
from bastion_batch.io.layout import PROFILES
from bastion_batch.io.store import LocalStore, Store, open_store

logger = logging.getLogger(__name__)


class StoreProfiles:
    """Profiles in a folder of an object store."""

    def __init__(self, store: Store, folder: str = "") -> None:
        self._store = store
        self._folder = f"{folder}/" if folder else ""

    def load(self, key: ProfileKey) -> Profile | None:
        """The profile of a key, if there is one."""
        name = f"{self._folder}{file_name(key)}"
        try:
            return decode(self._store.read(name), key, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("profile %s/%s is ignored: %s", self._store.root, name, error)
            return None

    def save(self, profile: Profile) -> None:
        """Keep a profile, in place of an older one of the same key."""
        name = f"{self._folder}{file_name(profile.key)}"
        try:
            self._store.put(name, encode(profile).encode())
        except OSError as error:
            logger.warning("the profile cannot be shared: %s", error)


class SharedProfiles:
    """This machine's own profiles, and behind them those that a job's workers share."""

    def __init__(self, own: ProfileStore, shared: ProfileStore) -> None:
        self._own = own
        self._shared = shared
        self._made: set[str] = set()

    def load(self, key: ProfileKey) -> Profile | None:
        """The own profile of a key, or else the shared one."""
        known = self._own.load(key)
        if known is not None:
            self._share(known)
            return known
        found = self._shared.load(key)
        if found is not None:
            logger.info("another worker has measured a device like this: %s", key.get("device"))
        return found

    def save(self, profile: Profile) -> None:
        """Keep a profile here, and share it unless there is another worker's."""
        self._own.save(profile)
        self._share(profile)

    def _share(self, profile: Profile) -> None:
        name = file_name(profile.key)
        if name in self._made or self._shared.load(profile.key) is None:
            self._made.add(name)
            self._shared.save(profile)


def shared_profiles(job: JobConfig) -> SharedProfiles:
    """The profiles that the workers of a job use."""
    return SharedProfiles(DirectoryProfiles(), _shared_of(job))


def _shared_of(job: JobConfig) -> ProfileStore:
    place = job.workers.profiles
    output = job.output if place is None else job.output.model_copy(update={"path": place})
    folder = PROFILES if place is None else ""
    store = open_store(output)
    if isinstance(store, LocalStore):
        return DirectoryProfiles(store.path(folder))
    return StoreProfiles(store, folder)
