"""Notices that machines will be taken away: from Ray, from a file, or from what a user adds.

A notice of the whole job ends the invocation in order, as SIGTERM does; a notice of some nodes
lets the workers there finish what they have, and others go on. What is not finished in time is
only decoded again.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from bastion_batch.io.store import Output, open_store

STOP_FILE = "_bastion/stop"
NOTICE_VARIABLE = "BASTION_BATCH_NOTICE_FILE"

logger = logging.getLogger(__name__)


class Notice(NamedTuple):
    """Machines that will go."""

    reason: str
    nodes: frozenset[str] | None = None
    """Ray's node ids, or host names; None: the job as a whole has to stop."""


class NoticeSource(Protocol):
    """Something that knows. Asked about once a second, by the driver."""

    def poll(self) -> Notice | None:
        """What is known now; the same again for as long as it holds."""
        ...


class StopFile:
    """`_bastion/stop` of the output: empty to stop the job, or with the names of hosts to leave."""

    def __init__(self, output: Output) -> None:
        self._store = open_store(output)

    def clear(self) -> None:
        """Remove the file: it was meant for an earlier invocation."""
        self._store.remove(STOP_FILE)

    def poll(self) -> Notice | None:
        """What the file says, if it is there."""
        try:
            text = self._store.read(STOP_FILE).decode(errors="replace")
        except FileNotFoundError:
            return None
        return _notice(f"{self._store.root}/{STOP_FILE}", text)


class NoticeFile:
    """A file on the driver's machine, for whoever watches it: empty, or the names of hosts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        """What the file says, if it is there."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        return _notice(str(self._path), text)


class RayDraining:
    """Nodes that Ray was told to drain: preempted, or idle. Ray has no public name for them."""

    def poll(self) -> Notice | None:
        """The nodes that are draining, if any is."""
        try:
            from ray._private.state import state
            from ray.exceptions import RayError
        except ImportError:
            return None
        find = getattr(state, "get_draining_nodes", None)
        if find is None:
            return None
        try:
            nodes = frozenset(find())
        except RayError as error:
            raise OSError(f"Ray does not answer: {error}") from error
        return Notice("Ray is draining the node", nodes) if nodes else None


def notice_sources(output: Output) -> list[NoticeSource]:
    """The sources that every job has."""
    sources: list[NoticeSource] = [StopFile(output), RayDraining()]
    path = os.environ.get(NOTICE_VARIABLE)
    return [*sources, NoticeFile(Path(path))] if path else sources


class Notices:
    """Everything that some sources say. One that fails is told of once, and asked again."""

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = sources
        self._failed: set[int] = set()

    def poll(self) -> list[Notice]:
        """What holds now."""
        return [notice for i in range(len(self._sources)) if (notice := self._ask(i)) is not None]

    def _ask(self, index: int) -> Notice | None:
        try:
            return self._sources[index].poll()
        except (OSError, RuntimeError) as error:
            if index not in self._failed:
                name = type(self._sources[index]).__name__
                logger.warning("%s cannot be asked for notices: %s", name, error)
            self._failed.add(index)
            return None


def _notice(where: str, text: str) -> Notice:
    names = frozenset(text.split())
    return Notice(f"{where} names the node", names) if names else Notice(f"{where} is there")
