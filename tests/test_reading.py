"""How much of the input is read by several workers: little more than there is."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from balances import MovingBalance
from local_cluster import LocalCluster

from bastion_batch.cluster.scripted import ScriptedEngines
from bastion_batch.config import parse_job
from bastion_batch.io.results import prove_complete

NUM_GROUPS, GROUP_ROWS = 100, 16
MOST_READ = 1.3


def num_read_bytes():
    """What this process has read from files so far, by the kernel's count."""
    text = Path("/proc/self/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["rchar"])


class Counting:
    """A reader of units that knows how much it has read."""

    def __init__(self, reader):
        self.reader = reader
        self.num_bytes = 0

    def read(self, unit):
        before = num_read_bytes()
        rows = self.reader.read(unit)
        self.num_bytes += num_read_bytes() - before
        return rows


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count reads")
def test_a_file_of_many_row_groups_is_read_about_once(tmp_path):
    chance = random.Random(3)
    count = NUM_GROUPS * GROUP_ROWS
    table = pa.table(
        {
            "prompt": [f"question {i}" for i in range(count)],
            "payload": [chance.randbytes(6_000) for _ in range(count)],
        }
    )
    path = tmp_path / "input.parquet"
    pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="none")
    job = parse_job(
        {
            "input": {"path": str(path), "prompt": "prompt"},
            "output": {"path": str(tmp_path / "out"), "unit_rows": 8, "steps": "off"},
            "model": {"target": "scripted"},
            "decoding": {"max_new_tokens": 20},
        }
    )
    c = LocalCluster(job, balance=MovingBalance)
    readers = []
    for i, max_batch in enumerate((2, 8, 16, 32)):
        worker = c.workers[c.start(f"w{i}", engines=ScriptedEngines(max_batch=max_batch))]
        worker._reader = Counting(worker._reader)
        readers.append(worker._reader)
    c.until(lambda: not c.workers, limit=20_000)
    read = sum(reader.num_bytes for reader in readers)
    prove_complete(job.output.path, c.plan)
    assert path.stat().st_size <= read <= MOST_READ * path.stat().st_size
