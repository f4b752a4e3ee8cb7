"""Commits to a full disk, and an output on a read-only one.

Run as a program, in a mount namespace where it may mount a small one.
"""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from io_jobs import planned, run_unit

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import committed_units
from bastion_batch.io.results import prove_complete
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import STEPS, TEMPORARY, LocalStore


def main(directory: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=True)
    plan = planned(directory, num_rows=8)
    filler = directory / "filler"
    fill(filler)

    slept: list[float] = []
    full = LocalStore(directory / "out", retries=Retries(num_tries=4, sleep=slept.append))
    message = "unit 0 cannot be committed: No space left on device"
    with pytest.raises(OSError, match=message) as failed:
        run_unit(full, plan, 0)
    assert failed.value.errno == errno.ENOSPC
    assert failed.value.filename == f"{full.root}/data/u00000000.parquet"
    assert len(slept) == 3, slept
    assert committed_units(full) == set()
    assert full.names(TEMPORARY) == full.names(STEPS) == []

    emptied = LocalStore(
        directory / "out", retries=Retries(sleep=lambda seconds: filler.unlink(missing_ok=True))
    )
    for unit in range(plan.num_units):
        assert run_unit(emptied, plan, unit).won
    prove_complete(emptied, plan)

    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    with pytest.raises(OutputError, match=r"other cannot be written: Read-only file system"):
        LocalStore(directory / "other").make_directories()


def fill(file: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        file.write_bytes(bytes(2 << 20))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
