"""Nodes on this machine that are not what a driver expects of them, for `test_run_cluster`.

A node's processes are told by an environment variable that they see another place instead of the
output, as if it did not share the storage.
"""

import os
from pathlib import Path

from bastion_batch.io.store import LocalStore

ELSEWHERE = "BASTION_BATCH_TEST_ELSEWHERE"


class NodeStore(LocalStore):
    """The output, or what stands in its place on this node."""

    def path(self, name):
        return Path(os.environ.get(ELSEWHERE, self.root), name)


def of_run(variable, run):
    """Processes whose environment names this run."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if state != "Z" and f"{variable}={run}".encode() in environment:
            found.append(int(directory.name))
    return found
