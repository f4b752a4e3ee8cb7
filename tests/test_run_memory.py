"""Engines are built for fewer rows where memory is short, and the machine's downloads take turns."""

import multiprocessing
import time

import pytest
import torch

from bastion_batch.cluster.start_memory import build_within_memory
from bastion_batch.engine.model_cache import one_at_a_time
from bastion_batch.errors import JobFailedError, ModelError

SPAWN = multiprocessing.get_context("spawn")


class Device:
    """Builds engines, which are their numbers of rows, up to a limit."""

    def __init__(self, limit, error):
        self.limit, self.error, self.asked = limit, error, []

    def build(self, rows):
        self.asked.append(rows)
        if rows == "auto" or rows > self.limit:
            raise self.error
        return rows


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        ValueError("memory of 9 bytes does not hold the largest pass, of 64 rows: 99 bytes"),
    ],
)
def test_fewer_rows_are_tried(error, caplog):
    device = Device(8, error)
    assert build_within_memory(device.build, 64) == 8
    assert device.asked == [64, 32, 16, 8]
    assert "trying with 8 rows" in caplog.text
    assert build_within_memory(Device(4, error).build, "auto") == 4


def test_when_nothing_fits_the_error_says_what_to_do():
    device = Device(0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(JobFailedError, match=r"one row: CUDA out of memory; is another process"):
        build_within_memory(device.build, 2)
    assert device.asked == [2, 1]


@pytest.mark.parametrize(
    "error", [ModelError("no such target"), ValueError("x"), RuntimeError("y")]
)
def test_other_faults_are_what_they_are(error):
    device = Device(0, error)
    with pytest.raises(type(error), match=str(error)):
        build_within_memory(device.build, 64)
    assert device.asked == [64]


def download(directory):
    with one_at_a_time(directory / "locks" / "a.lock"):
        others = list(directory.glob("inside-*"))
        mark = directory / f"inside-{time.monotonic_ns()}"
        mark.touch()
        time.sleep(0.2)
        mark.unlink()
        with (directory / "seen").open("a") as seen:
            seen.write(f"{len(others)}\n")


def test_downloads_of_a_machine_take_turns(tmp_path):
    processes = [SPAWN.Process(target=download, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "seen").read_text().split() == ["0", "0", "0"]
