"""What happens to workers in the middle of a job, and the bound that is left then.

Each mishap comes at half of the time that the job would have taken at the least. The bound is that
of the workers as they are, with nothing lost and nothing to notice: what a schedule that knew
everything could not beat.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from bastion_batch.bench.simulation.bound import Phase, lower_bound
from bastion_batch.bench.simulation.ours import Ours
from bastion_batch.bench.simulation.outcome import Outcome
from bastion_batch.bench.simulation.workers import H100, SimulatedWorker, reference_workers
from bastion_batch.bench.simulation.workload import WorkloadConfig, make_workload
from bastion_batch.bench.simulation.world import Incident, Mishap, Policy, World

NOTICE_SECONDS = 30.0
SICK_SPEED = 0.05


class MishapCase(NamedTuple):
    """A mishap of one worker, for the report."""

    title: str
    mishap: Mishap
    worker: int
    value: float = 0.0


MISHAPS = (
    MishapCase("a fast worker is lost", Mishap.LOST, 0),
    MishapCase("a slow worker is lost", Mishap.LOST, 4),
    MishapCase("a fast worker leaves, 30 s notice", Mishap.NOTICED, 0, NOTICE_SECONDS),
    MishapCase("a fast worker falls to 5 % of its rate", Mishap.SICK, 0, SICK_SPEED),
    MishapCase("a fast worker hangs", Mishap.SICK, 0, 0.0),
    MishapCase("a fast worker joins", Mishap.JOINS, 8),
)


def run_mishap(
    case: MishapCase, config: WorkloadConfig, make: Callable[[], Policy] = Ours
) -> dict[str, float | None]:
    """Makespan over the bound of what is left, and how soon a worker that joins is used."""
    outcome, bound = simulate_mishap(case, config, make)
    used = None
    if case.mishap is Mishap.JOINS:
        trace = outcome.traces[case.worker]
        if trace.first_start is not None:
            used = trace.first_start - trace.held_from
    return {
        "makespan_over_bound": outcome.makespan_seconds / bound,
        "used_after_seconds": used,
        "num_moves": outcome.num_moves,
        "lost_tokens": outcome.num_lost_tokens,
    }


def simulate_mishap(
    case: MishapCase, config: WorkloadConfig, make: Callable[[], Policy] = Ours
) -> tuple[Outcome, float]:
    """How a job with a mishap goes, and its bound."""
    rows = make_workload(config)
    workers = reference_workers(config.seed)
    half = lower_bound(rows, [Phase(0.0, workers)]) / 2
    before, after = _workers_around(case, workers)
    bound = lower_bound(rows, [Phase(0.0, before), Phase(half + _grace(case), after)])
    incident = Incident(half, case.worker, case.mishap, case.value)
    everyone = after if case.mishap is Mishap.JOINS else workers
    return World(rows, everyone, [incident]).run(make()), bound


def _grace(case: MishapCase) -> float:
    return case.value if case.mishap is Mishap.NOTICED else 0.0


def _workers_around(
    case: MishapCase, workers: tuple[SimulatedWorker, ...]
) -> tuple[tuple[SimulatedWorker, ...], tuple[SimulatedWorker, ...]]:
    """Workers before and after."""
    others = tuple(w for number, w in enumerate(workers) if number != case.worker)
    match case.mishap:
        case Mishap.JOINS:
            return workers, (*workers, replace(H100, name=f"w{len(workers)}"))
        case Mishap.SICK if case.value > 0:
            well = workers[case.worker]
            return workers, (*others, replace(well, saturated=well.saturated * case.value))
        case _:
            return workers, others
