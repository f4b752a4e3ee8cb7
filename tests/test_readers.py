"""What users read while a job runs: rows that are right, and never an error."""

import random
import sys
import threading
import time

import duckdb
import pandas
import pyarrow.dataset
import pytest
from datasets import disable_progress_bars, load_dataset
from io_jobs import planned, run_unit
from scripted_driver import wait_until
from test_run_local import NUM_ROWS, Job

from bastion_batch.cluster.scripted import scripted_ids
from bastion_batch.core.noise import row_key
from bastion_batch.records import Request, SamplingParams

COLUMNS = ["row_id", "prompt", "output"]


def by_duckdb(data, cache):
    with duckdb.connect() as connection:
        query = f"select {', '.join(COLUMNS)} from '{data}/*.parquet'"
        return connection.sql(query).fetchall()


def by_pyarrow(data, cache):
    return rows_of(pyarrow.dataset.dataset(data).to_table(columns=COLUMNS).to_pylist())


def by_pandas(data, cache):
    return rows_of(pandas.read_parquet(data, columns=COLUMNS).to_dict("records"))


def by_datasets(data, cache):
    disable_progress_bars()
    found = load_dataset("parquet", data_dir=str(data), split="train", cache_dir=str(cache))
    return rows_of(found.select_columns(COLUMNS).to_list())


def rows_of(records):
    return [tuple(record[name] for name in COLUMNS) for record in records]


READERS = (by_duckdb, by_pyarrow, by_pandas, by_datasets)


def read_at_random_moments(data, expected, caches, *, times, pause_seconds, seed=0):
    """Read by every reader so many times; the numbers of rows that were there."""
    chance = random.Random(seed)
    seen = []
    for moment in range(times):
        time.sleep(chance.uniform(0, pause_seconds))
        for reader in chance.sample(READERS, len(READERS)):
            num_files = len(list(data.iterdir()))
            rows = reader(data, caches / f"{moment}")
            assert set(rows) <= expected, reader.__name__
            assert len(set(rows)) == len(rows) >= num_files, reader.__name__
            seen.append(len(rows))
    return seen


def test_readers_of_a_growing_output_see_whole_units(tmp_path):
    plan = planned(tmp_path, num_rows=120, output__unit_rows=2)
    output = tmp_path / "out"
    ids = [f"f00000-{i:012d}" for i in range(120)]
    expected = {(row_id, f"say {i}", f"answer {row_id} 0") for i, row_id in enumerate(ids)}
    run_unit(output, plan, 0)

    def commit():
        for unit in range(1, plan.num_units):
            time.sleep(0.02)
            run_unit(output, plan, unit)

    committer = threading.Thread(target=commit)
    committer.start()
    try:
        seen = read_at_random_moments(
            output / "data", expected, tmp_path / "caches", times=3, pause_seconds=0.2
        )
    finally:
        committer.join()
    assert min(seen) < 120


@pytest.mark.ray
@pytest.mark.slow
def test_readers_at_fifty_moments_of_a_job(tmp_path):
    job = Job(tmp_path)
    expected = set()
    for i in range(NUM_ROWS):
        row_id, prompt = f"f00000-{i:012d}", f"question {i}"
        request = Request(
            row_id=row_id,
            prompt_ids=tuple(prompt.encode()),
            sampling=SamplingParams(max_new_tokens=40),
            noise_key=row_key(0, row_id, 0),
        )
        expected.add((row_id, prompt, bytes(scripted_ids(request)).decode()))
    data = job.output / "data"
    driver = job.start(0.6)
    try:
        wait_until(lambda: data.is_dir() and any(data.iterdir()), seconds=150)
        seen = read_at_random_moments(
            data, expected, tmp_path / "caches", times=50, pause_seconds=1.0
        )
        ended = job.end(driver)
    finally:
        driver.kill()
    assert ended.returncode == 0, ended.stderr
    job.check()
    num_partial = sum(count < NUM_ROWS for count in seen)
    sys.stdout.write(f"{len(seen)} readings, {num_partial} of a part of the rows\n")
    assert num_partial >= len(seen) // 4
