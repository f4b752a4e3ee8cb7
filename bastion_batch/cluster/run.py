"""A job from its description to its proven output: what `bastion-batch run` and the API call.

Nothing here is needed twice: running the same job again finds what is committed and goes on. All
that can be refused is refused before any device's time is spent.
"""

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bastion_batch.cluster.connect import connected, in_uploaded_working_dir
from bastion_batch.cluster.engines import EngineSource, PretrainedEngines
from bastion_batch.cluster.messages import AttemptRecord, Progress
from bastion_batch.cluster.placement import Slot, place
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import StopSignals
from bastion_batch.cluster.supervisor import Supervisor
from bastion_batch.cluster.worker import WorkerSpec
from bastion_batch.config import JobConfig
from bastion_batch.errors import BastionError, JobFailedError, OutputError, TooManyFailedRows
from bastion_batch.io.commit import claim_invocation, committed_units, remove_orphan_steps
from bastion_batch.io.plan import Plan, open_plan
from bastion_batch.io.results import prove_complete, read_totals
from bastion_batch.io.store import TEMPORARY, open_store
from bastion_batch.progress import Display, NoDisplay, ProgressFile
from bastion_batch.report import JobResult, result_of
from bastion_batch.run_record import RunRecord

RECORD_SECONDS = 5.0

logger = logging.getLogger(__name__)


class CoordinatorUnits(NamedTuple):
    """What the coordinator knows of a plan's units."""

    spans: list[int]
    num_outputs: list[int]


def run(
    job: JobConfig,
    *,
    display: Display | None = None,
    engines: EngineSource | None = None,
    before_data: Callable[[], None] | None = None,
) -> JobResult:
    """Run a job to its end, or continue it, and prove that its output is complete.

    Uses the Ray this process is connected to, or the cluster that is there, or a local one.
    `engines` and `before_data` (called in a worker between a unit's two files) are for tests.

    Raises:
        InputError: the job, its models, inputs or output are refused.
        JobFailedError: it stopped early; the same call continues it.
        TooManyFailedRows: it is complete, with more failed rows than its limit.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the same call continues it.
    """
    display = display or NoDisplay()
    job = resolve_paths(job, Path.cwd())
    with StopSignals(display.say) as signals:
        sources = engines or PretrainedEngines()
        plan = open_plan(job, sources.check(job))
        try:
            if len(committed_units(job.output.path)) == plan.num_units:
                display.say(f"{job.output.path} is complete; nothing to decode")
            else:
                _Invocation(job, plan, sources, display, signals, before_data).decode()
            result = _finish(job, plan)
        except OSError as error:
            raise JobFailedError(
                f"output {job.output.path}: {error}; run again to go on"
            ) from error
    _require_few_failures(job, result)
    return result


def coordinator_units(plan: Plan) -> CoordinatorUnits:
    """Number the spans through all files, and count the outputs of each unit."""
    spans: list[int] = []
    previous = None
    for key in zip(plan.units["file"].to_pylist(), plan.units["span"].to_pylist(), strict=True):
        spans.append(spans[-1] + (key != previous) if spans else 0)
        previous = key
    rows = plan.units["num_rows"].to_pylist()
    return CoordinatorUnits(spans, [n * plan.samples_per_row for n in rows])


def resolve_paths(job: JobConfig, directory: Path) -> JobConfig:
    """Absolute paths, once, where the user typed them.

    Raises:
        OutputError: they were typed elsewhere: this is Ray's copy of a working directory.
    """
    path = job.output.path
    if in_uploaded_working_dir(directory) and "://" not in path and not Path(path).is_absolute():
        raise OutputError(
            f"output.path {path} is relative, but a submitted job runs in Ray's copy of the "
            f"working directory, which is deleted with it: give --set output.path=$PWD/{path}"
        )
    return job.with_absolute_paths(directory)


class _Invocation:
    """One run of the job command that has units to decode."""

    def __init__(
        self,
        job: JobConfig,
        plan: Plan,
        engines: EngineSource,
        display: Display,
        signals: StopSignals,
        before_data: Callable[[], None] | None,
    ) -> None:
        self._started = time.monotonic()
        self._job = job
        self._plan = plan
        self._engines = engines
        self._display = display
        self._signals = signals
        self._before_data = before_data
        self._number = claim_invocation(job.output.path)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._record = RunRecord(job, plan.job_id)
        self._record.begin(self._number, now)
        self._progress_file = ProgressFile(job.output.path)
        self._last: tuple[Progress, list[AttemptRecord]] | None = None
        self._recorded_at = 0.0

    def decode(self) -> None:
        """Decode and commit every unit that is not yet committed."""
        self._save("running")
        status = "failed"
        try:
            with connected(num_cpus=self._num_cpus()):
                self._signals.rearm()
                self._supervise()
            status = "finished"
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except BastionError as error:
            logger.info("invocation %d ends: %s", self._number, error)
            raise
        finally:
            self._save(status)

    def _num_cpus(self) -> int:
        """CPUs of a Ray of our own: the machine's, and enough for the workers asked for."""
        count = self._job.workers.count
        return max(os.cpu_count() or 1, 1 if count == "auto" else count)

    def _supervise(self) -> None:
        # Ray is imported by `fleet`, and only now: its environment is set.
        from bastion_batch.cluster.fleet import CoordinatorClient, Fleet, cluster_nodes

        output = self._job.output.path
        slots = {slot.worker: slot for slot in place(cluster_nodes(), self._job.workers)}
        name = f"bastion-batch-{self._plan.job_id}-{self._number}"
        done = committed_units(output)
        units: dict[str, Any] = coordinator_units(self._plan)._asdict() | {"done": done}
        coordinator = CoordinatorClient(f"{name}-coordinator", units)
        self._display.say(
            f"{self._plan.num_units - len(done)} of {self._plan.num_units} units to decode, "
            f"{len(slots)} x {next(iter(slots.values())).device}"
        )
        Supervisor(
            fleet=Fleet(name, coordinator, self._engines),
            coordinator=coordinator,
            slots=slots,
            restarts=Restarts(slots, self._number),
            make_spec=self._spec,
            committed=partial(committed_units, output),
            observe=self._observe,
            signals=self._signals,
        ).run()

    def _spec(self, slot: Slot, attempt: int) -> WorkerSpec:
        return WorkerSpec(
            worker=slot.worker,
            attempt=attempt,
            job=self._job,
            job_id=self._plan.job_id,
            inputs=self._plan.inputs,
            steps=self._plan.steps,
            device=slot.device,
            workers_on_node=slot.workers_on_node,
            before_data=self._before_data,
        )

    def _observe(self, progress: Progress, attempts: list[AttemptRecord]) -> None:
        is_news = self._last is None or len(attempts) != len(self._last[1])
        self._last = progress, attempts
        self._display.show(progress)
        self._progress_file.write(progress)
        if is_news or time.monotonic() - self._recorded_at >= RECORD_SECONDS:
            self._recorded_at = time.monotonic()
            self._save("running")

    def _save(self, status: str) -> None:
        progress, attempts = self._last or (None, [])
        self._record.note(
            status,
            attempts,
            wall_seconds=time.monotonic() - self._started,
            decoding_seconds=progress.elapsed_seconds if progress else 0.0,
        )
        self._record.save()


def _finish(job: JobConfig, plan: Plan) -> JobResult:
    """Tidy and prove a job whose units are all committed. Changes nothing the second time."""
    output = job.output.path
    remove_orphan_steps(output)
    _remove_torn_files(output)
    prove_complete(output, plan)
    totals = read_totals(output, plan)
    record = RunRecord(job, plan.job_id)
    if not record.complete:
        record.save(totals._asdict())
    return result_of(output, plan, totals)


def _remove_torn_files(output: str) -> None:
    """Remove what workers were writing when they were killed; nobody needs it any more."""
    store = open_store(output)
    for name in store.names(TEMPORARY):
        if ".parquet." in name:
            store.remove(name)


def _require_few_failures(job: JobConfig, result: JobResult) -> None:
    allowed = job.limits.failed_rows_allowed(result.num_outputs)
    if result.num_failed > allowed:
        raise TooManyFailedRows(
            f"{result.num_failed} of {result.num_outputs} rows failed; "
            f"limits.max_failed is {job.limits.max_failed}: {allowed}"
        )
