"""A job from its description to its proven output: what `bastion-batch run` and the API call.

Nothing here is needed twice: running the same job again finds what is committed and goes on. All
that can be refused is refused before any device's time is spent.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from bastion_batch.cluster.connect import in_uploaded_working_dir
from bastion_batch.cluster.driver_lock import DriverLock, has_ended, read_driver, this_process
from bastion_batch.cluster.engines import EngineSource, PretrainedEngines
from bastion_batch.cluster.invocation import Driver, Invocation
from bastion_batch.cluster.logs import logging_to
from bastion_batch.cluster.pools import pools_of
from bastion_batch.cluster.signals import StopSignals
from bastion_batch.config import JobConfig
from bastion_batch.core.balance import Balance
from bastion_batch.errors import JobFailedError, OutputError, TooManyFailedRows
from bastion_batch.io.commit import claim_invocation, committed_units, remove_orphan_steps
from bastion_batch.io.journal import remove_journal
from bastion_batch.io.plan import Plan
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import prove_complete, read_totals
from bastion_batch.io.retry import choose
from bastion_batch.io.store import TEMPORARY, Store, open_store
from bastion_batch.progress import Display, NoDisplay
from bastion_batch.report import JobResult, result_of
from bastion_batch.run_record import RunRecord


def run(
    job: JobConfig,
    *,
    display: Display | None = None,
    engines: EngineSource | None = None,
    before_data: Callable[[], None] | None = None,
    takeover: bool = False,
    retry_failed: Collection[str] | None = None,
    balance: Callable[..., Balance] = Balance,
) -> JobResult:
    """Run a job to its end, or continue it, and prove that its output is complete.

    Uses the Ray this process is connected to, or the cluster that is there, or a local one.
    `takeover` goes on in place of a driver that may still run, which then stops. `retry_failed`
    decodes failed rows of a complete output again: those of these error kinds, or all if it is
    empty. `engines`, `before_data` (called in a worker between a unit's two files) and `balance`
    (makes what decides who decodes what) are for tests and measurements.

    Raises:
        InputError: the job, its models, inputs or output are refused; or another driver runs.
        JobFailedError: it stopped early; the same call continues it.
        TooManyFailedRows: it is complete, with more failed rows than its limit.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the same call continues it.
    """
    display = display or NoDisplay()
    job = resolve_paths(job, Path.cwd())
    store = open_store(job.output)
    pools_of(job.workers)  # a name that nobody knows is refused first of all
    with StopSignals(display.say) as signals:
        sources = engines or PretrainedEngines()
        target = sources.check(job)
        try:
            plan = open_plan(job, target)
            retry = None if retry_failed is None else choose(store, plan, frozenset(retry_failed))
            done = committed_units(store) if retry is None else retry.done(store, plan)
            complete = len(done) == plan.num_units
            if complete:
                display.say(f"{store.root} is complete; nothing to decode")
            if complete and has_ended(read_driver(store)):
                result = _finish(job, plan, store)
            else:
                number = claim_invocation(store)
                me = this_process(number)
                with (
                    DriverLock(store, me, takeover=takeover, say=display.say) as lock,
                    logging_to(store, f"driver-{number}"),
                ):
                    if retry is not None:
                        remove_journal(store, range(plan.num_units))
                    if not complete:
                        driver = Driver(
                            display, signals, lock, sources, before_data, retry, balance
                        )
                        Invocation(job, plan, store, number, driver).decode()
                    result = _finish(job, plan, store)
        except OSError as error:
            raise JobFailedError(f"output {store.root}: {error}; run again to go on") from error
    _require_few_failures(job, result)
    return result


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


def _finish(job: JobConfig, plan: Plan, store: Store) -> JobResult:
    """Prove and tidy a job whose units are all committed. Changes nothing the second time."""
    prove_complete(store, plan)
    remove_orphan_steps(store, plan)
    remove_journal(store, range(plan.num_units))
    _remove_torn_files(store)
    totals = read_totals(store, plan, complete=True)
    record = RunRecord(job, plan.job_id)
    if record.totals != totals._asdict():
        record.save(totals._asdict())
    return result_of(store, plan, totals)


def _remove_torn_files(store: Store) -> None:
    """Remove what workers were writing when they were killed; nobody needs it any more."""
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
