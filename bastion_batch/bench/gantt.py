"""The picture of simulated jobs: a band per worker, as high as its batch is full, over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bastion_batch.bench.simulation.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b6ea5", "#d98032", "#4f9d69", "#9467bd", "#8c564b")
MARKS = {"lost": "x", "noticed": "v", "joins": "^", "sick": "D"}


class Job(NamedTuple):
    """One panel."""

    title: str
    outcome: Outcome
    bound_seconds: float


def draw_jobs(jobs: Sequence[Job], path: Path) -> None:
    """Write a PNG with a panel per job, all with the same time axis; needs matplotlib."""
    from matplotlib.figure import Figure

    heights = [len(job.outcome.traces) for job in jobs]
    figure = Figure(figsize=(9, 0.8 + 0.26 * sum(heights) + 0.6 * len(jobs)), layout="constrained")
    panels = figure.subplots(len(jobs), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, job in zip(panels[:, 0], jobs, strict=True):
        _draw_job(axes, job)
    panels[-1, 0].set_xlabel("seconds")
    figure.savefig(path, dpi=130)


def _draw_job(axes: "Axes", job: Job) -> None:
    outcome = job.outcome
    devices = sorted({machine.worker.device for machine in outcome.machines})
    shown: set[str] = set()
    for lane, (machine, trace) in enumerate(zip(outcome.machines, outcome.traces, strict=True)):
        device = machine.worker.device
        seconds = [at for at, _ in trace.samples]
        tops = [lane + 0.85 * share for _, share in trace.samples]
        axes.fill_between(
            seconds,
            lane,
            tops,
            step="post",
            linewidth=0,
            color=COLOURS[devices.index(device) % len(COLOURS)],
            label=None if device in shown else device,
        )
        shown.add(device)
        for at, mark in trace.marks:
            axes.plot(at, lane + 0.4, marker=MARKS[mark], color="black", markersize=6)
    axes.axvline(job.bound_seconds, color="black", linestyle="--", linewidth=1, label="bound")
    ratio = outcome.makespan_seconds / job.bound_seconds
    axes.set_title(f"{job.title}: {ratio:.2f} x the bound", fontsize=9, loc="left")
    axes.set_yticks([])
    axes.set_ylim(0, len(outcome.traces))
    axes.legend(fontsize=7, loc="upper right", ncols=len(devices) + 1)
