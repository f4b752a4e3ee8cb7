"""The coordinator at scale: as many workers and rows as it should bear, on the simulated clock.

Rows are short, so that a second of the job has as many decisions as a large cluster makes. What is
timed is the product's coordinator, its balance and the workers' own row orders, in one process.
"""

import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from bastion_batch.bench.simulation.bound import Phase, lower_bound
from bastion_batch.bench.simulation.ours import Ours
from bastion_batch.bench.simulation.workers import SimulatedWorker
from bastion_batch.bench.simulation.workload import WorkloadConfig, make_workload
from bastion_batch.bench.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig:
    """How large."""

    num_workers: int = 1_000
    num_rows: int = 10_000_000
    mean_tokens: float = 100.0
    max_batch: int = 64
    rows_per_unit: int | None = None
    """As a plan cuts them when None."""
    rows_per_second: float = 20.0
    """Of each worker with every slot taken, about."""


def measure_scale(config: ScaleConfig, seed: int = 0) -> dict[str, Any]:
    """Run a job of this size; the report is JSON-able."""
    began, worked = time.perf_counter(), time.process_time()
    workload = make_workload(
        WorkloadConfig(
            num_rows=config.num_rows,
            mean_tokens=config.mean_tokens,
            max_new_tokens=2048,
            rows_per_unit=config.rows_per_unit,
            units_per_span=8,
            seed=seed,
        )
    )
    workers = _workers(config)
    bound = lower_bound(workload, [Phase(0.0, workers)])
    policy = Ours()
    with _without_collector():
        outcome = World(workload, workers).run(policy)
    num_done = policy.coordinator.progress(outcome.makespan_seconds).num_committed
    assert num_done == config.num_rows, f"{num_done} of {config.num_rows} rows are committed"
    worker_seconds = outcome.makespan_seconds * config.num_workers
    return {
        "setting": {"measure": "scale", **asdict(config)},
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "peak_bytes": _peak_bytes(),
        "simulated_seconds": outcome.makespan_seconds,
        "makespan_over_bound": outcome.makespan_seconds / bound,
        "rows_per_simulated_second": config.num_rows / outcome.makespan_seconds,
        "rows_per_cpu_second": config.num_rows / (time.process_time() - worked),
        "calls_per_worker_second": policy.num_calls / worker_seconds,
        "num_moves": outcome.num_moves,
    }


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing here makes reference cycles, or the peak of memory would show it.

    A collection would walk through what a thousand processes hold in reality.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _workers(config: ScaleConfig) -> tuple[SimulatedWorker, ...]:
    """Four kinds, up to four times as fast as each other."""
    saturated = config.rows_per_second * config.mean_tokens * 1.5
    return tuple(
        SimulatedWorker(
            name=f"w{number}",
            device=f"kind {number % 4}",
            saturated=saturated * (0.4, 0.8, 1.2, 1.6)[number % 4],
            half=config.max_batch / 4,
            max_batch=config.max_batch,
            price_per_hour=0.0,
        )
        for number in range(config.num_workers)
    )


def _peak_bytes() -> int:
    """Of this process, ever."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """What `make scale` runs."""
    report = measure_scale(ScaleConfig())
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
