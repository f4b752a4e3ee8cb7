"""What every node must have in common with the driver, asked before any model is loaded.

    versions    of this package and of what decides a text; by a function that is sent whole,
                because a node may lack the package
    storage     the node reads a nonce that the driver wrote to the output, and answers with one
                that the driver then reads: each sees what the other writes

A node that differs is named and not used; the job goes on with the others. Decoding is only
repeatable with the same code: see `bastion_batch.versions` for how far versions must agree.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bastion_batch.cluster.pools import Node
from bastion_batch.errors import InputError
from bastion_batch.io.store import TEMPORARY, Store
from bastion_batch.versions import COMPARED, differences, installed_versions

ANSWER_SECONDS = 60.0
"""How long the other nodes wait for one that does not answer."""
FIRST_ANSWER_SECONDS = 600.0
"""Installing a runtime environment may take minutes."""
SEEN_SECONDS = 3.0
"""How long a shared file system may take to show a new file."""

logger = logging.getLogger(__name__)


class Nodes(NamedTuple):
    """The nodes of a cluster, judged."""

    usable: list[Node]
    refused: dict[str, str]
    """Node ids and why."""


def usable_nodes(nodes: Sequence[Node], store: Store) -> Nodes:
    """Ask every node, and warn of those that cannot be used.

    Raises:
        InputError: none can.
    """
    here = installed_versions()
    finder = _version_finder()
    found = _ask_each({node.node_id: (finder, (COMPARED,)) for node in nodes})
    refused = {n: answer.fault for n, answer in found.items() if answer.fault}
    for node in nodes:
        if node.node_id not in refused:
            found_here = differences(here, found[node.node_id].value)
            if found_here.refused:
                refused[node.node_id] = f"it has {found_here.refused}"
            elif found_here.passed:
                logger.warning("node %s has %s", node.host, found_here.passed)
    same = [node for node in nodes if node.node_id not in refused]
    refused |= _storage_faults(same, store)
    _say_refused(nodes, refused, store.root)
    return Nodes([node for node in nodes if node.node_id not in refused], refused)


def prove_storage(store: Store, question: str, answer: str, nonce: bytes) -> str:
    """On a node: see the driver's nonce in the output, and write one there. What is wrong, or ""."""
    deadline = time.monotonic() + SEEN_SECONDS
    try:
        while (seen := _read(store, question)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if seen != nonce:
            return "it does not see the output's storage: a file of the driver is not there"
        store.put(answer, nonce)
    except (OSError, InputError) as error:
        return f"it cannot use the output's storage: {error}"
    return ""


class _Answer(NamedTuple):
    value: Any
    fault: str


def _version_finder() -> Callable[[Sequence[str]], dict[str, str]]:
    """A function that names nothing of this package, so that it runs where there is none."""

    def find(packages: Sequence[str]) -> dict[str, str]:
        import importlib
        import importlib.metadata
        import platform

        found = {"python": platform.python_version()}
        for package in packages:
            try:
                if package == "bastion_batch":
                    found[package] = importlib.import_module(package).__version__
                elif package != "python":
                    found[package] = importlib.metadata.version(package)
            except ImportError:
                found[package] = "not installed"
        return found

    return find


def _storage_faults(nodes: Sequence[Node], store: Store) -> dict[str, str]:
    nonce = uuid4().hex
    question = f"{TEMPORARY}/nonce-{nonce}"
    answers = {node.node_id: f"{question}-{node.node_id}" for node in nodes}
    store.put(question, nonce.encode())
    try:
        found = {
            node_id: answer.fault or answer.value or _unseen(store, answers[node_id], nonce)
            for node_id, answer in _ask_each(
                {
                    n: (prove_storage, (store, question, a, nonce.encode()))
                    for n, a in answers.items()
                }
            ).items()
        }
        return {node_id: fault for node_id, fault in found.items() if fault}
    finally:
        for name in (question, *answers.values()):
            store.remove(name)


def _unseen(store: Store, answer: str, nonce: str) -> str:
    deadline = time.monotonic() + SEEN_SECONDS
    while (seen := _read(store, answer)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return "" if seen == nonce.encode() else "the driver does not see what it writes to the output"


def _ask_each(
    calls: Mapping[str, tuple[Callable[..., Any], Sequence[object]]],
) -> dict[str, _Answer]:
    """Call a function on each of these nodes; a node that does not answer in time has a fault."""
    if not calls:
        return {}
    asked = {
        ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(*arguments): node_id
        for node_id, (function, arguments) in calls.items()
    }
    ray.wait(list(asked), timeout=FIRST_ANSWER_SECONDS)
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    for reference in silent:
        ray.cancel(reference, force=True)
    no_answer = _Answer(None, f"it has not answered for {ANSWER_SECONDS:.0f} s")
    return {asked[r]: _answer(r) for r in ready} | {asked[r]: no_answer for r in silent}


def _answer(reference: Any) -> _Answer:  # noqa: ANN401 - an object reference
    try:
        return _Answer(ray.get(reference), "")
    except RayTaskError as error:
        return _Answer(None, f"a look at it failed: {error.cause!r}")
    except RayError as error:
        return _Answer(None, f"a look at it failed: {next(iter(str(error).splitlines()), '')}")


def _say_refused(nodes: Sequence[Node], refused: Mapping[str, str], root: str) -> None:
    lines = [f"node {n.host}: {refused[n.node_id]}" for n in nodes if n.node_id in refused]
    if len(lines) == len(nodes):
        raise InputError(f"no node can be used for output {root}:\n  " + "\n  ".join(lines))
    for line in lines:
        logger.warning("%s; it is not used", line)


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None
