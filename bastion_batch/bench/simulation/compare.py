"""Policies side by side on the same simulated jobs: time over the bound, hours and money."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bastion_batch.bench.gantt import Job, draw_jobs
from bastion_batch.bench.picture import require_matplotlib
from bastion_batch.bench.simulation.baselines import Batches, Pull, Split
from bastion_batch.bench.simulation.bound import Phase, decode_bound, lower_bound
from bastion_batch.bench.simulation.mishaps import MISHAPS, MishapCase, run_mishap
from bastion_batch.bench.simulation.ours import Ours
from bastion_batch.bench.simulation.outcome import Outcome
from bastion_batch.bench.simulation.workers import reference_workers
from bastion_batch.bench.simulation.workload import WorkloadConfig, make_workload
from bastion_batch.bench.simulation.world import Policy, World
from bastion_batch.errors import InputError

Progress = Callable[[str], None]

POLICIES: tuple[Callable[[], Policy], ...] = (
    Ours,
    lambda: Ours(moves=False),
    lambda: Pull(moves=True),
    Pull,
    Batches,
    lambda: Split(by_rate=True),
    lambda: Split(by_rate=False),
)
PICTURED = (0, 3, 6)
"""Of the policies: those that the picture shows."""
NUM_SAMPLES = 400
"""Points of a worker's band in the picture, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What to simulate."""

    num_rows: int = 20_000
    sigmas: tuple[float, ...] = (1.0,)
    """Standard deviations of the log length."""
    shares: tuple[float, ...] = (0.8,)
    """Of its variance, how much can be predicted."""
    num_seeds: int = 3

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise InputError(f"--rows {self.num_rows}: at least 1")
        if self.num_seeds < 1:
            raise InputError(f"--seeds {self.num_seeds}: at least 1")
        for sigma in self.sigmas:
            if not 0 < sigma <= 3:
                raise InputError(f"--sigma {sigma:g}: above 0 and at most 3")
        for share in self.shares:
            if not 0 <= share <= 1:
                raise InputError(f"--share {share:g}: from 0 to 1")


class Run(NamedTuple):
    """One policy on one job."""

    policy: str
    outcome: Outcome
    bound_seconds: float

    def figures(self) -> dict[str, float]:
        """What is reported of it."""
        outcome = self.outcome
        return {
            "makespan_over_bound": outcome.makespan_seconds / self.bound_seconds,
            "makespan_seconds": outcome.makespan_seconds,
            "gpu_hours": outcome.held_seconds / 3600,
            "cost": outcome.cost,
            "idle_share": outcome.idle_share,
            "num_moves": outcome.num_moves,
        }


def run_simulation(
    config: SimulationConfig, out: Path | None = None, progress: Progress = lambda line: None
) -> dict[str, Any]:
    """Run every policy on every job, and ours through every mishap; the report is JSON-able.

    With `out`, the report and a picture of three policies are written there.

    Raises:
        InputError: a picture is wanted and cannot be drawn.
    """
    if out is not None:
        require_matplotlib()
    cases = []
    for sigma in config.sigmas:
        for share in config.shares:
            progress(f"sigma {sigma:g}, share {share:g}")
            cases.append(_run_case(config, sigma, share))
    report = {
        "setting": {"measure": "simulation", **asdict(config), "workers": _describe(0)},
        "cases": cases,
        "mishaps": [_run_mishaps(config, mishap, progress) for mishap in MISHAPS],
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (out / "simulation.json").write_text(text, encoding="utf-8")
        _draw(config, out / "simulation.png")
    return report


def run_policy(
    make: Callable[[], Policy], workload: WorkloadConfig, *, is_sampled: bool = False
) -> Run:
    """One policy on one job with the reference workers of the job's seed."""
    rows = make_workload(workload)
    workers = reference_workers(workload.seed)
    bound = lower_bound(rows, [Phase(0.0, workers)])
    policy = make()
    world = World(rows, workers, sample_seconds=bound / NUM_SAMPLES if is_sampled else None)
    return Run(policy.name, world.run(policy), bound)


def _run_case(config: SimulationConfig, sigma: float, share: float) -> dict[str, Any]:
    """Every policy on the jobs of one kind."""
    jobs = [_job(config, sigma, share, seed) for seed in range(config.num_seeds)]
    runs = [[run_policy(make, job) for job in jobs] for make in POLICIES]
    rows = make_workload(jobs[0])
    return {
        "sigma": sigma,
        "share": share,
        "bound_seconds": fmean(run.bound_seconds for run in runs[0]),
        "decode_bound_seconds": decode_bound(rows, reference_workers(jobs[0].seed)),
        "policies": {of_policy[0].policy: _mean_figures(of_policy) for of_policy in runs},
    }


def _job(config: SimulationConfig, sigma: float, share: float, seed: int) -> WorkloadConfig:
    return WorkloadConfig(num_rows=config.num_rows, sigma=sigma, share=share, seed=seed)


def _mean_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds, and the ratio of each."""
    figures = [run.figures() for run in runs]
    means = {name: fmean(f[name] for f in figures) for name in figures[0]}
    return {**means, "each_over_bound": [f["makespan_over_bound"] for f in figures]}


def _run_mishaps(
    config: SimulationConfig, mishap: MishapCase, progress: Progress
) -> dict[str, Any]:
    progress(mishap.title)
    figures = [
        run_mishap(mishap, _job(config, config.sigmas[0], config.shares[0], seed))
        for seed in range(config.num_seeds)
    ]
    columns = {
        name: [value for f in figures if (value := f[name]) is not None] for name in figures[0]
    }
    means = {name: fmean(values) if values else None for name, values in columns.items()}
    return {
        "mishap": mishap.title,
        **means,
        "each_over_bound": [f["makespan_over_bound"] for f in figures],
    }


def _describe(seed: int) -> list[dict[str, Any]]:
    return [asdict(worker) for worker in reference_workers(seed)]


def _draw(config: SimulationConfig, path: Path) -> None:
    job = _job(config, config.sigmas[0], config.shares[0], 0)
    runs = [run_policy(POLICIES[number], job, is_sampled=True) for number in PICTURED]
    draw_jobs([Job(run.policy, run.outcome, run.bound_seconds) for run in runs], path)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    for case in report["cases"]:
        lines.append(
            f"sigma {case['sigma']:g}, predictable share {case['share']:g}, "
            f"{report['setting']['num_rows']} rows, bound {case['bound_seconds']:.0f} s"
        )
        lines.append(
            f"  {'':<28}{'over bound':>11}{'GPU-hours':>11}{'cost':>8}{'idle':>7}{'moves':>8}"
        )
        lines += [_line(name, figures) for name, figures in case["policies"].items()]
    case = report["cases"][0]
    lines.append(f"mishaps at half time, sigma {case['sigma']:g}, share {case['share']:g}")
    for mishap in report["mishaps"]:
        used = mishap["used_after_seconds"]
        lines.append(
            f"  {mishap['mishap']:<40}{mishap['makespan_over_bound']:>7.3f} x the bound of what is left"
            + ("" if used is None else f", used after {used:.1f} s")
        )
    return "\n".join(lines)


def _line(name: str, figures: dict[str, Any]) -> str:
    return (
        f"  {name:<28}{figures['makespan_over_bound']:>11.3f}{figures['gpu_hours']:>11.2f}"
        f"{figures['cost']:>8.2f}{figures['idle_share']:>7.1%}{figures['num_moves']:>8.0f}"
    )
