"""How each worker of an invocation does, for people and for `progress.json`."""

from collections.abc import Sequence
from typing import NamedTuple

from bastion_batch.cluster.ledger import Held
from bastion_batch.cluster.messages import AttemptRecord


class WorkerState(NamedTuple):
    """One incarnation of a worker that holds a place. JSON-able; fields may come, not go."""

    worker: str
    attempt: int
    pool: str
    state: str
    """``loads`` its models, or ``decodes``."""
    host: str | None
    device: str | None
    """As the worker found it, whatever was selected."""
    dtype: str | None
    threads: int | None
    max_batch: int | None
    num_running: int | None
    """Rows in its engine when it last reported."""
    tokens_per_second: float | None
    """Now, at the batch it has."""
    saturated_tokens_per_second: float | None
    """What the fitted rate curve says of its largest batch."""
    speedup: float | None
    """Over plain decoding, measured in its bursts."""
    step_seconds: float | None
    """Mean of its steps."""
    predicted_step_seconds: float | None
    """Mean of what its latency model said of the same steps."""
    price_per_hour: float | None
    held_seconds: float
    cost: float | None
    mismatch: str | None
    """Where the device is not what the pool selects."""


def worker_states(attempts: Sequence[AttemptRecord], held: Sequence[Held]) -> list[WorkerState]:
    """The workers that hold a place now, in order of attempt."""
    records = {record.attempt: record for record in attempts}
    return [_state(records.get(one.attempt), one) for one in held if one.holds]


def _state(record: AttemptRecord | None, held: Held) -> WorkerState:
    info = {} if record is None else record.info
    view = None if record is None else record.view
    max_batch = info.get("max_batch")
    num_steps = 0 if record is None else record.counts.num_steps
    return WorkerState(
        worker=held.worker,
        attempt=held.attempt,
        pool=held.pool,
        state="loads" if record is None else "decodes",
        host=info.get("host"),
        device=info.get("device"),
        dtype=info.get("dtype"),
        threads=info.get("threads"),
        max_batch=max_batch,
        num_running=None if record is None else record.num_running,
        tokens_per_second=None if view is None else view.tokens_per_second,
        saturated_tokens_per_second=(
            view.fit.curve.total(max_batch) if view and view.fit and max_batch else None
        ),
        speedup=None if record is None else record.counts.measured_speedup,
        step_seconds=record.counts.step_seconds / num_steps if record and num_steps else None,
        predicted_step_seconds=(
            record.counts.predicted_seconds / num_steps if record and num_steps else None
        ),
        price_per_hour=held.price_per_hour,
        held_seconds=held.seconds,
        cost=held.cost,
        mismatch=info.get("mismatch"),
    )
