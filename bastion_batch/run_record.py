"""`run.json`: what ran where, and how fast; written while the job runs, so that a kill leaves it.

Rows and tokens come from the committed files; the rest is the engines' own account, one entry per
invocation of the job. Each invocation replaces its own entry and keeps what it finds of others',
so that a driver that was superseded, and writes once more, takes nothing away.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bastion_batch.cluster.ledger import Held, total_cost
from bastion_batch.cluster.messages import AttemptRecord
from bastion_batch.config import JobConfig
from bastion_batch.io.filesystems import without_credentials
from bastion_batch.io.store import Output, open_store
from bastion_batch.records import EngineTotals, measured_speedup
from bastion_batch.versions import installed_versions

RECORD = "run.json"
_EXACT_DTYPES = {"float32", "float64"}

logger = logging.getLogger(__name__)


def read_record(output: Output) -> dict[str, Any] | None:
    """The record of an output, or None where there is none or it is damaged."""
    store = open_store(output)
    try:
        record = json.loads(store.read(RECORD))
    except FileNotFoundError:
        return None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        logger.warning("%s/%s is damaged and is begun anew", store.root, RECORD)
        return None
    return record


class RunRecord:
    """Keeps `run.json` up to date. Saving replaces the whole file; a reader sees a whole one."""

    def __init__(self, job: JobConfig, job_id: str) -> None:
        """Continue the record that is there, if it is this job's."""
        self._job = job
        self._job_id = job_id
        self._store = open_store(job.output)
        self._own: dict[str, Any] | None = None
        found = self._found()
        self.complete: bool = found["complete"]
        self.totals: dict[str, Any] | None = found["totals"]
        """Of the complete job, as they were when it was proven last."""

    def begin(self, invocation: int, started: str) -> None:
        """Add an entry for this invocation. `started` is a UTC time, for people."""
        self._own = {
            "invocation": invocation,
            "started": started,
            "versions": installed_versions(),
        }

    def note(
        self,
        status: str,
        attempts: Sequence[AttemptRecord],
        held: Sequence[Held] = (),
        *,
        wall_seconds: float,
        decoding_seconds: float,
    ) -> None:
        """Replace what is known of the invocation that was begun."""
        assert self._own is not None, "an invocation was begun"
        self._own |= {
            "status": status,
            "wall_seconds": round(wall_seconds, 3),
            "decoding_seconds": round(decoding_seconds, 3),
            "workers": _workers(attempts, held),
            "pools": [pool._asdict() for pool in pool_totals(attempts, held)],
        }

    def save(self, totals: Mapping[str, Any] | None = None) -> None:
        """Write the file. `totals`, from the committed files, mean that the job is complete."""
        found = self._found()
        invocations = self._merged(found["invocations"])
        record = {
            "format": 1,
            "name": self._job.name,
            "job_id": self._job_id,
            "complete": totals is not None or found["complete"],
            "job": redacted(self._job.model_dump(mode="json")),
            "totals": found["totals"] if totals is None else totals,
            "speedup": measured_speedup(engine_counts(invocations)),
            "exactness": exactness(invocations),
            "invocations": invocations,
        }
        self._store.put(RECORD, json.dumps(record, indent=1).encode())

    def _found(self) -> dict[str, Any]:
        """What is on file of this job."""
        record = read_record(self._store) or {}
        if record.get("job_id") != self._job_id:
            return {"complete": False, "totals": None, "invocations": []}
        return record

    def _merged(self, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries on file, in order, with this invocation's own as it is now.

        An earlier one that was left running was killed.
        """
        if self._own is None:
            return list(found)
        number = self._own["invocation"]
        others = [
            i | {"status": "killed"} if i["status"] == "running" and i["invocation"] < number else i
            for i in found
            if i["invocation"] != number
        ]
        return sorted([*others, self._own], key=lambda i: i["invocation"])


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


class PoolTotals(NamedTuple):
    """What the workers of a pool held, cost and made, in one invocation or in several."""

    pool: str
    num_workers: int
    """Over its life; of several invocations the most."""
    held_hours: float
    cost: float | None
    """Dollars; None where the pool has no price."""
    num_tokens: int
    """Committed by their engines, those of rows that were decoded again included."""

    @property
    def tokens_per_dollar(self) -> float | None:
        """None where nothing was paid."""
        return self.num_tokens / self.cost if self.cost else None

    def plus(self, other: "PoolTotals") -> "PoolTotals":
        """Both as one, of two invocations."""
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return PoolTotals(
            pool=self.pool,
            num_workers=max(self.num_workers, other.num_workers),
            held_hours=self.held_hours + other.held_hours,
            cost=sum(costs) if costs else None,
            num_tokens=self.num_tokens + other.num_tokens,
        )


def pool_totals(attempts: Sequence[AttemptRecord], held: Sequence[Held]) -> list[PoolTotals]:
    """The totals of each pool that has held a place."""
    tokens = {record.attempt: record.counts.num_committed for record in attempts}
    pools: dict[str, list[Held]] = {}
    for one in held:
        pools.setdefault(one.pool, []).append(one)
    return [
        PoolTotals(
            pool=pool,
            num_workers=len({one.worker for one in members}),
            held_hours=sum(one.seconds for one in members) / 3600,
            cost=total_cost(members),
            num_tokens=sum(tokens.get(one.attempt, 0) for one in members),
        )
        for pool, members in pools.items()
    ]


def all_pools(invocations: Iterable[Mapping[str, Any]]) -> list[PoolTotals]:
    """The totals of each pool over the recorded invocations."""
    found: dict[str, PoolTotals] = {}
    for invocation in invocations:
        for entry in invocation.get("pools", ()):
            totals = PoolTotals(**entry)
            known = found.get(totals.pool)
            found[totals.pool] = totals if known is None else known.plus(totals)
    return list(found.values())


def redacted(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same without credentials: storage options, and user parts of URLs."""
    if isinstance(value, dict):
        return {k: "redacted" if k == "storage_options" else redacted(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redacted(v) for v in value]
    return without_credentials(value) if isinstance(value, str) else value


def _workers(attempts: Sequence[AttemptRecord], held: Sequence[Held]) -> list[dict[str, Any]]:
    accounts = {one.attempt: one for one in held}
    return [_worker(attempt, accounts.get(attempt.attempt)) for attempt in attempts]


def _worker(attempt: AttemptRecord, held: Held | None) -> dict[str, Any]:
    curve = attempt.view.fit.curve if attempt.view and attempt.view.fit else None
    return {
        "worker": attempt.worker,
        "attempt": attempt.attempt,
        "num_units": attempt.num_units,
        "engine": dict(attempt.info),
        "counts": attempt.counts._asdict(),
        "rate_curve": None if curve is None else curve._asdict(),
        "held_seconds": None if held is None else round(held.seconds, 3),
        "cost": None if held is None else held.cost,
    }
