"""Where a job stands, from its output alone: no cluster is asked, and any machine can look."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bastion_batch.cluster.driver_lock import (
    STALE_SECONDS,
    TOUCH_SECONDS,
    Driver,
    age_of_living,
    read_driver,
    this_process,
)
from bastion_batch.cluster.messages import Progress
from bastion_batch.engine.probe_report import ProbeReport
from bastion_batch.io.plan import Plan
from bastion_batch.io.results import read_totals
from bastion_batch.io.store import Output, Store, open_store
from bastion_batch.progress import PROGRESS_FILE, progress_line
from bastion_batch.report import duration
from bastion_batch.run_record import read_record

WATCH_SECONDS = TOUCH_SECONDS + 5
"""How long to look for a touch by a driver on another machine."""


MAX_WORKERS = 24
"""Lines of the table of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job as its output shows it. Samples are counted as outputs of their own."""

    name: str
    output: str
    job_id: str
    state: str
    """``complete``, ``running``, or ``not running``."""
    num_units: int
    num_units_planned: int
    num_outputs: int
    """Committed."""
    num_outputs_planned: int
    num_failed: int
    error_kinds: dict[str, int]
    num_output_tokens: int
    driver: dict[str, Any] | None
    """Who runs or last ran it."""
    driver_lives: bool
    driver_age_seconds: float | None
    """Since it was seen alive, if it is."""
    progress: dict[str, Any] | None
    """What the last invocation last said."""
    progress_age_seconds: float | None
    """By the clocks of two machines, perhaps."""
    eta_seconds: float | None
    """Until the end, of a running job; None until it can be told."""
    workers: tuple[dict[str, Any], ...]
    """Of the last invocation; while it runs, those that hold a place, and how each does."""
    cost: float | None
    """Dollars that the last invocation's workers with a price have cost."""
    num_invocations: int
    last_invocation: str | None
    """How the last one ended, or ``running``; a killed one could not say."""


def read_status(
    output: Output,
    plan: Plan,
    *,
    say: Callable[[str], None],
    watch_seconds: float = WATCH_SECONDS,
) -> Status:
    """Look at an output.

    Args:
        output: of any state.
        plan: the output's.
        say: told when it takes a while to see whether a driver on another machine lives.
        watch_seconds: how long it may take.
    """
    store = open_store(output)
    record: Mapping[str, Any] = read_record(store) or {}
    totals = read_totals(store, plan)
    driver = read_driver(store)
    age = _driver_age(store, driver, say, watch_seconds)
    progress = _read_progress(store)
    progress_age = None if progress is None else max(0.0, time.time() - progress["written_at"])
    complete = totals.num_units == plan.num_units
    lives = age is not None
    invocations = record.get("invocations", [])
    return Status(
        name=record.get("name", "job"),
        output=store.root,
        job_id=plan.job_id,
        state=_state(complete, lives),
        num_units=totals.num_units,
        num_units_planned=plan.num_units,
        num_outputs=totals.num_outputs,
        num_outputs_planned=plan.num_outputs,
        num_failed=totals.num_failed,
        error_kinds=totals.error_kinds,
        num_output_tokens=totals.num_output_tokens,
        driver=None if driver is None else _shown(driver),
        driver_lives=lives,
        driver_age_seconds=age,
        progress=progress,
        progress_age_seconds=progress_age,
        eta_seconds=_eta(progress, progress_age) if lives and not complete else None,
        workers=_workers(progress if lives else None, invocations),
        cost=None if progress is None else progress.get("cost"),
        num_invocations=len(invocations),
        last_invocation=invocations[-1].get("status") if invocations else None,
    )


def status_table(status: Status) -> str:
    """The same for people: aligned lines."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(status.error_kinds.items()))
    lines = [
        ("job", f"{status.name} ({status.job_id}), {status.state}"),
        ("output", status.output),
        ("rows", f"{status.num_outputs:,} of {status.num_outputs_planned:,}"),
        ("units", f"{status.num_units:,} of {status.num_units_planned:,}"),
        ("failed rows", f"{status.num_failed:,}" + (f" ({kinds})" if kinds else "")),
        ("output tokens", f"{status.num_output_tokens:,}"),
        ("driver", _driver_line(status)),
        ("progress", _progress_line(status)),
        ("time left", "-" if status.eta_seconds is None else duration(status.eta_seconds)),
        ("cost", "-" if status.cost is None else f"${status.cost:,.2f}"),
        ("workers", _workers_line(status)),
        ("drafter", _drafter_line(status)),
        ("invocations", _invocations_line(status)),
    ]
    table = "\n".join(f"{label:<17}{value}" for label, value in lines)
    return f"{table}\n{_worker_table(status.workers)}" if _has_rates(status.workers) else table


def _state(complete: bool, lives: bool) -> str:
    if lives:
        return "running"
    return "complete" if complete else "not running"


def _driver_age(
    store: Store, driver: Driver | None, say: Callable[[str], None], watch_seconds: float
) -> float | None:
    """Seconds since a living driver was seen alive; None where none lives."""
    if driver is None:
        return None

    def watch(holder: Driver) -> float | None:
        say(f"the driver is on another machine; looking for up to {watch_seconds:.0f} s")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < watch_seconds:
            now = read_driver(store)
            if now is not None and now.num_touches != holder.num_touches and not now.ended:
                return waited
            time.sleep(min(1.0, watch_seconds / 10))
        return None

    return age_of_living(driver, this_process(0), watch, STALE_SECONDS)


def _read_progress(store: Store) -> dict[str, Any] | None:
    try:
        return json.loads(store.read(PROGRESS_FILE))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _eta(progress: Mapping[str, Any] | None, age_seconds: float | None) -> float | None:
    if progress is None or age_seconds is None or progress["eta_seconds"] is None:
        return None
    return max(0.0, progress["eta_seconds"] - age_seconds)


def _shown(driver: Driver) -> dict[str, Any]:
    names = ("invocation", "host", "pid", "ray_job", "since", "ended")
    return {name: getattr(driver, name) for name in names}


def _workers(
    progress: Mapping[str, Any] | None, invocations: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], ...]:
    if progress is not None and progress.get("workers"):
        return tuple(progress["workers"])
    return tuple(_worker(w) for w in invocations[-1].get("workers", ())) if invocations else ()


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    engine = worker.get("engine", {})
    return {
        "worker": worker["worker"],
        "attempt": worker["attempt"],
        "host": engine.get("host"),
        "device": engine.get("device"),
        "drafter": engine.get("drafter"),
        "probe": engine.get("probe"),
        "num_units": worker["num_units"],
    }


def _driver_line(status: Status) -> str:
    driver = status.driver
    if driver is None:
        return "none so far"
    name = f"process {driver['pid']} on {driver['host']}, since {driver['since']}"
    if driver["ray_job"]:
        name += f", Ray job {driver['ray_job']}"
    if status.driver_age_seconds is not None:
        return f"{name}; seen alive {status.driver_age_seconds:.0f} s ago"
    return f"{name}; {'it has ended' if driver['ended'] else 'it is gone'}"


def _progress_line(status: Status) -> str:
    if status.progress is None or status.progress_age_seconds is None:
        return "-"
    known = {name: status.progress[name] for name in Progress._fields if name in status.progress}
    return f"{duration(status.progress_age_seconds)} ago: {progress_line(Progress(**known))}"


def _has_rates(workers: Sequence[Mapping[str, Any]]) -> bool:
    return any("tokens_per_second" in worker for worker in workers)


def _worker_table(workers: Sequence[Mapping[str, Any]]) -> str:
    """A line for each worker, the first ones of many; and what is wrong with their devices."""
    heads = ("worker", "pool", "state", "device", "rows", "tokens/s", "speedup", "step", "$/h")
    rows = [heads, *(_cells(worker) for worker in workers[:MAX_WORKERS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    if len(workers) > MAX_WORKERS:
        lines.append(f"and {len(workers) - MAX_WORKERS} more: --json has all")
    lines += sorted({f"warning: {w['mismatch']}" for w in workers if w.get("mismatch")})
    return "\n".join(lines)


def _cells(worker: Mapping[str, Any]) -> tuple[str, ...]:
    running, most = worker["num_running"], worker["max_batch"]
    return (
        worker["worker"],
        worker["pool"],
        worker["state"],
        worker["device"] or "-",
        "-" if running is None else f"{running}/{most}",
        _shown_number(worker["tokens_per_second"], ",.0f"),
        _shown_number(worker["speedup"], ".2f"),
        _step_cell(worker["step_seconds"], worker["predicted_step_seconds"]),
        _shown_number(worker["price_per_hour"], ".2f"),
    )


def _step_cell(seconds: float | None, predicted: float | None) -> str:
    if seconds is None or predicted is None:
        return "-"
    return f"{1000 * seconds:.1f} ms ({1000 * predicted:.1f} predicted)"


def _shown_number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _workers_line(status: Status) -> str:
    names = [f"{w['worker']} ({w['device']}, {w['host']})" for w in status.workers]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{len(names)}: {', '.join(names[:6])}{more}" if names else "-"


def _drafter_line(status: Status) -> str:
    """The drafters of the last invocation, each with what its probe found."""
    found = {
        f"{w['drafter']} ({_probe_verdict(w.get('probe'))})"
        for w in status.workers
        if w.get("drafter") is not None
    }
    return "; ".join(sorted(found)) or "-"


def _probe_verdict(content: Mapping[str, Any] | None) -> str:
    if not content:
        return "not probed"
    try:
        return ProbeReport.of_dict(content).verdict
    except (KeyError, TypeError, ValueError):
        return "probed by another version"


def _invocations_line(status: Status) -> str:
    if not status.num_invocations:
        return "none"
    ended = status.last_invocation
    if ended == "running" and not status.driver_lives:
        ended = "killed"
    return f"{status.num_invocations}, the last one {ended}"
