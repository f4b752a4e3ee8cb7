"""Jobs on real clusters whose workers, nodes and drivers are killed at random moments.

A driver is a process of its own. Whatever was killed, the same command is given again until it
ends well; then the output must be whole.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
from scripted_driver import read_json, wait_until

from bastion_batch.cluster.scripted import scripted_ids
from bastion_batch.core.noise import row_key
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.verify import described, verify
from bastion_batch.records import Request, SamplingParams

REPOSITORY = Path(__file__).parents[1]
MAX_STARTS = 12
NEW_TOKENS = 40


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Command:
    """A command that runs one job, to be given again and again."""

    def __init__(self, arguments: Sequence[str], output: Path, **environment: str) -> None:
        self.output = output
        self._arguments = arguments
        self._environment = environment | {
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests"))),
            "RAY_AUTH_MODE": "disabled",
        }
        self._log = (output.parent / "driver.log").open("ab")
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        """Give the command."""
        self.num_starts += 1
        assert self.num_starts <= MAX_STARTS, self.log()
        self._driver = subprocess.Popen(
            [sys.executable, *self._arguments],
            cwd=REPOSITORY,
            env=os.environ | self._environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def log(self) -> str:
        """What all drivers wrote."""
        return (self.output.parent / "driver.log").read_text(errors="replace")

    def workers(self) -> list[int]:
        """Process ids of the living workers that the last invocation has registered."""
        invocations = read_json(self.output / "run.json").get("invocations", [])
        workers = invocations[-1].get("workers", ()) if invocations else ()
        return [pid for pid in (w["engine"]["pid"] for w in workers) if is_running(pid)]

    def is_over(self) -> bool:
        """Whether the job is done. A driver that ended otherwise is started again."""
        code = self._driver.poll()
        if code is None:
            return False
        if code == 0:
            return True
        assert code in (1, -signal.SIGKILL), f"exit code {code}\n{self.log()}"
        self.start()
        return False

    def kill_driver(self) -> None:
        """End it as an operating system short of memory does."""
        self._driver.kill()
        self._driver.wait()

    def kill_worker(self, random: Random) -> None:
        """One of those that run, if any."""
        workers = self.workers()
        if workers:
            os.kill(random.choice(workers), signal.SIGKILL)

    def close(self) -> None:
        """End what is left."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait()
        self._log.close()


def live_through(command: Command, accidents: Sequence[Callable[[], None]], random: Random) -> None:
    """Let a job run into these accidents, each a while after workers are at work, to its end."""
    for accident in accidents:
        wait_until(lambda: command.is_over() or command.workers(), 150)
        time.sleep(random.uniform(0.0, 2.5))
        if command.is_over():
            return
        accident()
    wait_until(command.is_over, 240)


def require_whole(output: Path) -> None:
    """What is promised of every finished output."""
    plan = load_plan(output)
    assert plan is not None
    found = verify(output, plan, read_json(output / "run.json"))
    assert found.clean, described(found)
    assert not found.num_unnamed_steps
    assert not list((output / "_bastion/tmp").iterdir())
    rows = pq.read_table(output / "data")["row_id"].to_pylist()
    assert Counter(rows).most_common(1)[0][1] == plan.samples_per_row


def write_scripted_job(directory: Path, num_rows: int) -> Path:
    """A job file for scripted engines."""
    prompts = directory / "prompts.jsonl"
    rows = ({"prompt": f"question {i}"} for i in range(num_rows))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "input": {"path": str(prompts), "prompt": "prompt"},
        "output": {"path": str(directory / "out"), "unit_rows": 10},
        "model": {"target": "scripted"},
        "decoding": {"max_new_tokens": NEW_TOKENS},
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def require_scripted_text(output: Path, num_rows: int) -> None:
    """Every row has the text that is its own."""
    rows = pq.read_table(output / "data").to_pylist()
    assert [row["prompt"] for row in rows] == [f"question {i}" for i in range(num_rows)]
    for row in rows:
        request = Request(
            row_id=row["row_id"],
            prompt_ids=tuple(row["prompt"].encode()),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
            noise_key=row_key(0, row["row_id"], 0),
        )
        assert row["output"] == bytes(scripted_ids(request)).decode()
