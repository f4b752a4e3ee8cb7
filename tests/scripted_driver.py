"""A driver for tests that end its processes: runs a job with scripted engines, by itself.

python scripted_driver.py JOB STEP_SECONDS [MARKER | --takeover]

With a marker, the first worker to come between its two files ends there, and makes that file.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bastion_batch.cluster.run import run
from bastion_batch.cluster.scripted import ScriptedEngines
from bastion_batch.config import load_job
from bastion_batch.errors import BastionError, ModelError
from bastion_batch.progress import PlainDisplay
from bastion_batch.report import table


def die_once(marker):
    """End this process by SIGKILL, if no process has done so before."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledEngines(ScriptedEngines):
    """Engines that find the device that their node's label `device` names, if it has one."""

    def build(self, job, device, share):
        import ray

        engine = ScriptedEngines.build(self, job, device, share)
        found = ray.get_runtime_context().get_node_labels().get("device")
        if found is not None:
            engine.info = engine.info._replace(device=found, dtype=job.model.dtype)
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyEngines(ScriptedEngines):
    """Engines that fail to load (`broken`) or refuse their model (`unknown`)."""

    fault: str

    def build(self, job, device, share):
        if self.fault == "broken":
            raise RuntimeError("CUDA driver initialization failed")
        raise ModelError(f"target {job.model.target}: layer type 'mamba' is not supported")


def main(job_file, step_seconds, option=None):
    """The exit code, as the command line would give it."""
    takeover = option == "--takeover"
    marker = None if takeover else option
    try:
        result = run(
            load_job(job_file),
            display=PlainDisplay(sys.stderr),
            engines=LabelledEngines(max_batch=4, step_seconds=float(step_seconds)),
            before_data=partial(die_once, marker) if marker else None,
            takeover=takeover,
        )
    except BastionError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(table(result))
    return 0


def wait_until(condition, seconds=60.0):
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def read_json(path):
    """The file's content, or an empty mapping where there is none."""
    return json.loads(Path(path).read_text()) if Path(path).exists() else {}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
