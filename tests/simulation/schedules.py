"""One run of a small job, all of it from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fault_store import Fault
from io_jobs import write_jsonl

from bastion_batch.config import JobConfig, parse_job
from bastion_batch.io.plan_file import load_plan
from simulation.accidents import Accidents
from simulation.cluster import Cluster
from simulation.settings import Mode, draw
from simulation.watched import Reference, WatchedStore, reference
from simulation.world import Note, World

MAX_SECONDS = 500.0
"""No schedule takes longer than this, times the scale."""

_SHAPES = ((5, 2, 1), (11, 4, 1), (6, 4, 2), (16, 8, 1))
"""Input rows, output rows of a unit, samples of a row; rows are moved about in the last."""


class Workload(NamedTuple):
    """A job and its right answers."""

    job: JobConfig
    expected: Reference


class Ended(NamedTuple):
    """How a schedule went."""

    num_invocations: int
    seconds: float
    faults: frozenset[tuple[str, str, Fault]]
    """Method, folder and fault of the calls to storage that went wrong."""
    acknowledged_at_death: frozenset[int]
    """See `Post`."""
    num_tasks: int
    num_continued: int
    """See `Post`."""
    noted: Sequence[Note]


@cache
def workloads(directory: Path) -> Sequence[Workload]:
    """The jobs, with their input files in this directory."""
    return [_workload(directory / f"in{i}.jsonl", *shape) for i, shape in enumerate(_SHAPES)]


def _workload(path: Path, num_rows: int, unit_rows: int, samples: int) -> Workload:
    rows = [{"id": i, "prompt": None if i == 3 else f"say {i}"} for i in range(num_rows)]
    write_jsonl(path, rows)
    job = parse_job(
        {
            "input": {"path": str(path), "prompt": "prompt"},
            "output": {"path": "memory", "unit_rows": unit_rows},
            "model": {"target": "scripted"},
            "decoding": {"max_new_tokens": 9, "samples_per_row": samples},
        }
    )
    return Workload(job, reference(job))


def run(seed: int, directory: Path, kind: type[Cluster] = Cluster, **changes: Any) -> Ended:
    """Run one schedule, with its settings so changed.

    What it ends with, if not well, carries the seed and all that happened.
    """
    world = World(seed)
    mode, jobs = Mode.of(seed), workloads(directory)
    job, expected = jobs[-1] if mode is Mode.MOVING else world.random.choice(jobs)
    settings = replace(draw(world.random, mode), **changes)
    world.scale = settings.scale
    memory = WatchedStore(expected, conditional=settings.conditional)
    cluster = kind(world, memory, job, settings)
    try:
        cluster.start_driver()
        Accidents(cluster, settings)
        world.run(lambda: cluster.done and not world.has_living, MAX_SECONDS * settings.scale)
        plan = load_plan(memory)
        assert plan is not None
        memory.require_complete(plan)
    except BaseException as error:
        error.add_note(f"{world.trace()}\nseed {seed}, {settings}")
        raise
    finally:
        world.close()
    return Ended(
        len(cluster.lives),
        world.now,
        frozenset(cluster.storage.faults_met),
        frozenset(cluster.post.acknowledged_at_death),
        cluster.post.num_tasks,
        cluster.post.num_continued,
        world.noted,
    )
