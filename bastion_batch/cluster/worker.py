"""The process that decodes: leases units, feeds its engine, commits what is complete.

A plain class, made a Ray actor elsewhere. It owns one engine on one device, and the units that it
has opened: their input columns, their outcomes, their journal and their commit. It may die at any
instruction. Then its units get other owners, who go on from what is journaled, and nothing of
them was written; a unit's file is made by its owner alone, in one act.

    start -> turn, turn, ... -> finish        the coordinator has no more, or says that it ends
                  |
                  +-> abort                   anything raised: the engine is not to be trusted

A turn reads the mail, leases, feeds, makes one step, commits, journals and reports; it takes as
long as its step and never waits for another process. Told to end, by mail or by a report's
answer, the worker first journals what is finished, then the tokens of what is not, then commits
what is complete: whatever comes in between, nothing journaled is decoded again.

A fault of a row is its outcome. A storage error in a commit is tried again by the store, then
ends the worker; in the journal it costs nothing but decoding again. Every other fault ends the
worker. The rows that were then in the engine are named to the coordinator: see `faults`.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bastion_batch.cluster.dtype import settle_dtype
from bastion_batch.cluster.engines import EngineSource, as_mapping
from bastion_batch.cluster.exchange import Exchange
from bastion_batch.cluster.feeder import Feeder
from bastion_batch.cluster.keeper import Keeper
from bastion_batch.cluster.links import Link
from bastion_batch.cluster.live_rows import Finished, LiveRows
from bastion_batch.cluster.logs import log_to_file
from bastion_batch.cluster.mail import Mail
from bastion_batch.cluster.messages import (
    Directions,
    Done,
    Lease,
    Place,
    Wait,
)
from bastion_batch.cluster.node import NodeShare
from bastion_batch.cluster.open_unit import OpenUnit, Owner
from bastion_batch.cluster.pools import Pool
from bastion_batch.cluster.reporter import ENTERING_REPORT_SECONDS, REPORT_SECONDS, Reporter
from bastion_batch.config import JobConfig
from bastion_batch.errors import OutputError
from bastion_batch.io.journal import Journal, JournalReader
from bastion_batch.io.layout import ATTEMPTS_PER_INVOCATION
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.retry import Retry
from bastion_batch.io.sources import InputFile
from bastion_batch.io.store import Store, open_store
from bastion_batch.records import RowKey
from bastion_batch.versions import require_versions

IDLE_SECONDS = 0.2

logger = logging.getLogger(__name__)


class StalledRow(RuntimeError):
    """A row gets no token although the engine makes steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One incarnation of a worker."""

    worker: str
    attempt: int
    job: JobConfig
    job_id: str
    """The plan's: proves that the worker sees the output the driver planned."""
    inputs: tuple[InputFile, ...]
    """Where the inputs are now; they may have moved since the plan was made."""
    steps: str
    """Which steps this invocation records."""
    device: str
    workers_on_node: int | None
    """Workers that share this one's cores; None if that was not known beforehand."""
    pool: Pool | None = None
    """The pool that it belongs to; `job` is the pool's."""
    versions: Mapping[str, str] | None = None
    """The driver's, which this process must have too."""
    before_data: Callable[[], None] | None = None
    """Called between a unit's steps file and its data file: tests end the process there."""
    retry: Retry | None = None
    """Rows that failed, to be decoded again in units that are committed."""


class Worker:
    """Decodes one job's units until the coordinator has no more."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link,
        engines: EngineSource,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        store: Store | None = None,
    ) -> None:
        """Cheap: models are loaded by `start`. `store` is the job's output unless given."""
        self._spec = spec
        self._link = link
        self._engines = engines
        self._clock = clock
        self._sleep = sleep
        self._store = store or open_store(spec.job.output)
        self._resources = ExitStack()
        self._inbox: deque[Mail | Directions] = deque()
        self._blamed: Collection[RowKey] | None = ()
        """Rows that may be why the engine ends; None: all that are in it."""
        self._asked = False
        self._ask_again_at = 0.0
        self._started = False
        self._told_to_end = False
        self._done: Done | None = None

    # The process

    def run(self) -> None:
        """Work until the coordinator says that it is done."""
        if self._spec.versions is not None:
            require_versions(self._spec.versions)
        plan = self.shared_plan()
        log_to_file(self._store, f"{self._spec.worker}-{self._spec.attempt}")
        try:
            self.start(plan)
            while self.turn():
                pass
            self.finish()
        except Exception:
            logger.exception("worker %s ends", self._spec.worker)
            self.abort()
            raise
        finally:
            self.close()

    def deliver(self, mail: Mail | Directions) -> None:
        """Take in a message, at any time and in any thread; the next turn reads it."""
        self._inbox.append(mail)

    def shared_plan(self) -> Plan:
        """The driver's plan, read from storage before any model is loaded."""
        plan = load_plan(self._store)
        if plan is None or plan.job_id != self._spec.job_id:
            raise OutputError(
                f"host {socket.gethostname()} does not see the job's plan in output "
                f"{self._spec.job.output.path}: every node must share the output's storage"
            )
        return replace(
            plan,
            inputs=self._spec.inputs,
            steps=self._spec.steps,
            storage_options=self._spec.job.input.storage_options,
        )

    def start(self, plan: Plan) -> None:
        """Load the models, and tell the coordinator."""
        spec = self._spec
        share = NodeShare.of(spec.job.workers.threads, spec.workers_on_node, spec.device)
        logger.info("attempt %d: loading %s", spec.attempt, spec.job.model.target)
        job = settle_dtype(spec.job, self._store, lambda: self._engines.auto_dtype(spec.device))
        self._engine = self._engines.build(job, spec.device, share)
        self._live = LiveRows(self._engine, spec.worker, spec.attempt, self._clock)
        self._exchange = Exchange(spec.attempt, self._link, self._live, self._clock)
        journal = Journal(self._store, plan, spec.worker, spec.attempt)
        self._keeper = Keeper(journal, self._exchange, self._link, self._clock, spec.before_data)
        self._feeder = Feeder(self._engine, self._live, self._exchange, self._keeper.flush)
        self._earlier = JournalReader(self._store, plan)
        self._owner = Owner(
            worker=spec.worker,
            attempt=spec.attempt,
            device=str(self._engine.info.device),
            dtype=str(self._engine.info.dtype),
            job=spec.job,
            plan=plan,
            store=self._store,
            renderer=PromptRenderer(spec.job.input, self._engine.tokenizer),
            check=self._engine.check,
            retry=spec.retry,
        )
        info = {
            **as_mapping(self._engine.info),
            **Place(socket.gethostname(), os.getpid())._asdict(),
            **(spec.pool.note_on(str(self._engine.info.device)) if spec.pool else {}),
        }
        logger.info("attempt %d: ready on %s", spec.attempt, info["device"])
        self._link.register(spec.worker, info)
        self._reader = self._resources.enter_context(UnitReader(plan))
        self._reporter = Reporter(self._engine, self._exchange, self._link, self._clock)
        self._started = True

    def turn(self) -> bool:
        """Read, lease, feed, step, commit, journal, report. False when there is no more to do."""
        self._read_mail()
        self._lease()
        if self._told_to_end or (self._done is not None and self._done.drained):
            logger.info("attempt %d: told to end", self._spec.attempt)
            self._keeper.leave()
            return False
        if self._done is not None and not self._exchange.open:
            return False
        self._exchange.serve_shares()
        self._report_entering(self._feeder.feed())
        if self._engine.has_work:
            self._step()
        elif not self._asked:
            self._sleep(IDLE_SECONDS)
        self._keeper.commit_complete()
        self._keeper.flush_when_due()
        self._report_when_due()
        return True

    def finish(self) -> None:
        """Say the last word."""
        self._engine.save_profile()
        self._reporter.send()
        self._link.close()
        num_finished = self._reporter.num_finished
        logger.info("attempt %d: done after %d outputs", self._spec.attempt, num_finished)

    def abort(self) -> None:
        """After an error: journal what is finished, and name the rows that may have caused it."""
        if not self._started:
            return
        self._keeper.flush()
        self._reporter.send(self._blamed)
        self._link.close()

    def close(self) -> None:
        """Close what is open."""
        self._resources.close()

    # What comes in

    def _read_mail(self) -> None:
        """Take in what other workers sent, and the answer to the last report."""
        directions = self._link.directions()
        if directions is not None:
            self._inbox.append(directions)
        while self._inbox:
            match self._inbox.popleft():
                case Directions() as directions:
                    self._told_to_end |= directions.drain
                    self._keeper.may_commit_faults |= directions.may_commit_faults
                    self._exchange.follow(directions)
                case mail:
                    self._exchange.receive(mail)
        self._exchange.ask_after_absent()

    def _lease(self) -> None:
        """Keep one lease asked for while another unit is wanted; open at most one."""
        if self._done is not None or self._told_to_end:
            return
        if not self._asked:
            if not self._feeder.wants_unit or self._clock() < self._ask_again_at:
                return
            self._link.ask()
            self._asked = True
        reply = self._link.answer(0.0 if self._engine.has_work else IDLE_SECONDS)
        if reply is None:
            return
        self._asked = False
        match reply:
            case Lease():
                self._open_unit(reply)
            case Wait():
                self._ask_again_at = self._clock() + reply.seconds
            case Done():
                self._done = reply

    def _open_unit(self, lease: Lease) -> None:
        logger.debug("unit %d: opened, epoch %d", lease.unit, lease.epoch)
        if lease.unit in self._exchange.open:
            self._keeper.flush()  # it was taken from this worker and comes back
        rows = self._reader.read(lease.unit)
        invocation = self._spec.attempt - self._spec.attempt % ATTEMPTS_PER_INVOCATION
        before = invocation if lease.epoch == 1 else None  # of this one, nobody had it
        journaled = self._earlier.read(lease.unit, before_attempt=before)
        unit = OpenUnit(lease, rows, journaled, self._owner)
        self._exchange.take_over(unit)
        if lease.suspects:
            self._keeper.flush()  # the next end of an engine may be this one's

    # The engine

    def _step(self) -> None:
        self._blamed = None
        results = self._live.step()
        self._blamed = ()
        for result in results:
            if isinstance(result, Finished):
                self._reporter.count(result)
        self._exchange.settle(results)

    # What goes out

    def _report_when_due(self, seconds: float = REPORT_SECONDS) -> None:
        if self._reporter.is_due(seconds):
            self._require_progress()
            self._reporter.send()

    def _report_entering(self, has_fed: bool) -> None:
        """Name the rows that may end the engine at the next step, where one is likely to."""
        if self._feeder.fed_suspect:
            self._report_when_due(0.0)
        elif has_fed and self._reporter.has_just_begun:
            self._report_when_due(ENTERING_REPORT_SECONDS)

    def _require_progress(self) -> None:
        seconds = self._spec.job.limits.no_progress_seconds
        stalled = self._live.stalled(seconds)
        if stalled is not None:
            self._blamed = (stalled,)
            raise StalledRow(f"row {stalled[0]}: no token in {2 * seconds:.0f} s of steps")
