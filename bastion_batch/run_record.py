"""`run.json`: what ran where, and how fast; written while the job runs, so that a kill leaves it.

Rows and tokens come from the committed files; the rest is the engines' own account, one entry per
invocation of the job.
"""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from bastion_batch import __version__
from bastion_batch.cluster.messages import AttemptRecord
from bastion_batch.config import JobConfig
from bastion_batch.records import EngineTotals, measured_speedup

RECORD = "run.json"
_EXACT_DTYPES = {"float32", "float64"}


def read_record(output: str | Path) -> dict[str, Any] | None:
    """The record of an output, or None where there is none or it is damaged."""
    try:
        return json.loads((Path(output) / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


class RunRecord:
    """Keeps `run.json` up to date. Saving replaces the whole file."""

    def __init__(self, job: JobConfig, job_id: str) -> None:
        """Continue the record that is there, if it is this job's."""
        record = read_record(job.output.path) or {}
        own = record.get("job_id") == job_id
        self.complete: bool = own and record["complete"]
        self._invocations = [_ended(i) for i in record["invocations"]] if own else []
        self._job = job
        self._job_id = job_id

    def begin(self, invocation: int, started: str) -> None:
        """Add an entry for this invocation. `started` is a UTC time, for people."""
        self._invocations.append(
            {"invocation": invocation, "started": started, "versions": versions()}
        )

    def note(
        self,
        status: str,
        attempts: Sequence[AttemptRecord],
        *,
        wall_seconds: float,
        decoding_seconds: float,
    ) -> None:
        """Replace what is known of the invocation begun last."""
        self._invocations[-1] |= {
            "status": status,
            "wall_seconds": round(wall_seconds, 3),
            "decoding_seconds": round(decoding_seconds, 3),
            "workers": [_worker(attempt) for attempt in attempts],
        }

    def save(self, totals: Mapping[str, Any] | None = None) -> None:
        """Write the file. `totals`, from the committed files, mean that the job is complete."""
        record = {
            "format": 1,
            "name": self._job.name,
            "job_id": self._job_id,
            "complete": totals is not None,
            "job": redacted(self._job.model_dump(mode="json")),
            "totals": totals,
            "speedup": measured_speedup(engine_counts(self._invocations)),
            "exactness": exactness(self._invocations),
            "invocations": self._invocations,
        }
        write_atomically(self._job.output.path, RECORD, json.dumps(record, indent=1))


def write_atomically(output: str | Path, name: str, text: str) -> None:
    """Replace a file of the output; a reader sees the old content or the new."""
    temporary = Path(output) / "_bastion" / "tmp" / f"{Path(name).name}.{uuid4().hex}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(Path(output) / name)


def engine_counts(invocations: Iterable[Mapping[str, Any]]) -> list[EngineTotals]:
    """The counts of every engine of these invocations."""
    return [EngineTotals.of(w["counts"]) for i in invocations for w in i.get("workers", ())]


def exactness(invocations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What may be said of the text, from the number formats and devices that made it."""
    engines = [w["engine"] for i in invocations for w in i.get("workers", ())]
    dtypes = sorted({engine["dtype"].removeprefix("torch.") for engine in engines})
    device_types = sorted({engine["device_type"] for engine in engines})
    exact = bool(engines) and set(dtypes) <= _EXACT_DTYPES and len(dtypes + device_types) == 2
    if exact:
        statement = (
            f"{dtypes[0]} on one device type ({device_types[0]}): the text equals plain "
            "decoding's, token for token"
        )
    else:
        statement = (
            "the text follows the target's distribution exactly; near-ties may fall otherwise "
            f"than in plain decoding ({', '.join(dtypes)} on {', '.join(device_types)})"
        )
    return {
        "text_equals_plain_decoding": exact,
        "dtypes": dtypes,
        "device_types": device_types,
        "statement": statement if engines else "no engine has run",
    }


def versions() -> dict[str, str]:
    """The versions that decide what a run does."""
    found = {"bastion_batch": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "ray", "pyarrow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def redacted(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same without credentials: storage options, and user parts of URLs."""
    if isinstance(value, dict):
        return {k: "redacted" if k == "storage_options" else redacted(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redacted(v) for v in value]
    return re.sub(r"(?<=://)[^/@\s]+@", "", value) if isinstance(value, str) else value


def _ended(invocation: dict[str, Any]) -> dict[str, Any]:
    """An earlier entry as it stands now: one that was left running was killed."""
    killed = invocation["status"] == "running"
    return invocation | ({"status": "killed"} if killed else {})


def _worker(attempt: AttemptRecord) -> dict[str, Any]:
    return {
        "worker": attempt.worker,
        "attempt": attempt.attempt,
        "num_units": attempt.num_units,
        "engine": dict(attempt.info),
        "counts": attempt.counts._asdict(),
    }
