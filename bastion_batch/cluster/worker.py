"""The process that decodes: leases units, feeds its engine, commits what is complete.

A plain class, made a Ray actor elsewhere. It owns one engine on one device, and the units that it
has opened: their input columns, their outcomes and their commit. The coordinator is asked for the
next unit before it is needed, so that the engine does not run dry.

A row that cannot be decoded is a terminal error row. Every other fault propagates: the worker
ends, the coordinator gives its open units to another one, and nothing of them was written.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from bastion_batch.cluster.engines import DecodingEngine, EngineSource, as_mapping
from bastion_batch.cluster.links import Link
from bastion_batch.cluster.messages import (
    Done,
    Lease,
    Place,
    Wait,
    WorkerReport,
)
from bastion_batch.cluster.node import NodeShare, log_to_file
from bastion_batch.cluster.open_unit import OpenUnit
from bastion_batch.config import JobConfig
from bastion_batch.errors import OutputError
from bastion_batch.io.plan import Plan, load_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.sources import InputFile
from bastion_batch.records import Completion

REPORT_SECONDS = 1.0
IDLE_SECONDS = 0.2
MAX_RENDERED_PER_STEP = 32
"""Prompts tokenised between two steps: bounds how long the live rows wait for the next ones."""

logger = logging.getLogger(__name__)


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
    workers_on_node: int
    """Workers that share this one's cores."""
    before_data: Callable[[], None] | None = None
    """Called between a unit's steps file and its data file: tests end the process there."""


class Worker:
    """Decodes one job's units until the coordinator has no more."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link,
        engines: EngineSource,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Cheap: models are loaded by `run`."""
        self._spec = spec
        self._link = link
        self._engines = engines
        self._clock = clock
        self._open: list[OpenUnit] = []
        self._requested: dict[tuple[str, int], OpenUnit] = {}
        self._num_finished = 0
        self._num_finished_tokens = 0
        self._asked = False
        self._ask_again_at = 0.0
        self._reported_at = 0.0
        self._done: Done | None = None

    def place(self) -> Place:
        """Answers as soon as the worker's process exists."""
        return Place(socket.gethostname(), os.getpid())

    def run(self) -> None:
        """Work until the coordinator says that it is done."""
        plan = self._shared_plan()
        log_to_file(Path(self._spec.job.output.path), self._spec.worker)
        try:
            self._work(plan)
        except Exception:
            logger.exception("worker %s ends", self._spec.worker)
            raise

    def _shared_plan(self) -> Plan:
        """The driver's plan, read from storage before any model is loaded."""
        output = self._spec.job.output.path
        plan = load_plan(output)
        if plan is None or plan.job_id != self._spec.job_id:
            raise OutputError(
                f"host {socket.gethostname()} does not see the job's plan in output {output}: "
                "every node must share the output's storage"
            )
        return replace(plan, inputs=self._spec.inputs, steps=self._spec.steps)

    def _work(self, plan: Plan) -> None:
        spec = self._spec
        share = NodeShare.of(spec.job.workers.threads, spec.workers_on_node, spec.device)
        logger.info("attempt %d: loading %s", spec.attempt, spec.job.model.target)
        self._plan = plan
        self._engine = self._engines.build(spec.job, spec.device, share)
        self._renderer = PromptRenderer(spec.job.input, self._engine.tokenizer)
        info = {**as_mapping(self._engine.info), **self.place()._asdict()}
        logger.info("attempt %d: ready on %s", spec.attempt, info["device"])
        self._link.register(spec.worker, info)
        with closing(UnitReader(plan)) as self._reader:
            while self._turn(self._engine):
                pass
        self._engine.save_profile()
        self._link.report(self._report())
        self._link.close()
        logger.info("attempt %d: done after %d outputs", spec.attempt, self._num_finished)

    def _turn(self, engine: DecodingEngine) -> bool:
        """Lease, feed, step, commit, report. False when there is nothing more to do."""
        self._lease()
        if self._done is not None and (self._done.drained or not self._open):
            return False
        self._feed(engine)
        if engine.has_work:
            for completion in engine.step():
                self._take(completion)
        elif not self._asked and not self._open:
            time.sleep(IDLE_SECONDS)
        self._commit_complete()
        self._report_when_due()
        return True

    def _lease(self) -> None:
        """Keep one lease asked for while the engine could soon use its rows."""
        while self._done is None:
            if not self._asked:
                if not self._wants_unit() or self._clock() < self._ask_again_at:
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

    def _wants_unit(self) -> bool:
        """Whether the engine is not full, or has little in reserve.

        A deep reserve would hold rows back from idle workers when the job ends.
        """
        engine = self._engine
        num_rows = engine.num_running + engine.num_waiting + sum(u.num_unfed for u in self._open)
        return num_rows < engine.max_batch + max(2, engine.max_batch // 4)

    def _open_unit(self, lease: Lease) -> None:
        logger.debug("unit %d: opened, epoch %d", lease.unit, lease.epoch)
        rows = self._reader.read(lease.unit)
        self._open.append(
            OpenUnit(
                lease,
                self._plan,
                rows,
                worker=self._spec.worker,
                attempt=self._spec.attempt,
                device=str(self._engine.info.device),
                job=self._spec.job,
            )
        )

    def _feed(self, engine: DecodingEngine) -> None:
        """Queue rows until as many wait as can run, the oldest unit's first."""
        num_rendered = 0
        for unit in self._open:
            while unit.num_unfed and engine.num_waiting < engine.max_batch:
                if num_rendered == MAX_RENDERED_PER_STEP:
                    return
                num_rendered += 1
                request = unit.next_request(self._renderer, engine.check)
                if request is not None:
                    self._requested[request.row_id, request.sample_index] = unit
                    engine.add(request)

    def _take(self, completion: Completion) -> None:
        unit = self._requested.pop((completion.row_id, completion.sample_index))
        unit.add(completion)
        self._num_finished += 1
        self._num_finished_tokens += completion.num_output_tokens

    def _commit_complete(self) -> None:
        for unit in [unit for unit in self._open if unit.complete]:
            summary = unit.commit(self._spec.before_data)
            self._open.remove(unit)
            self._link.committed(unit.lease, summary)
            logger.info(
                "unit %d: committed, %d outputs, %d failed%s",
                unit.lease.unit,
                summary.num_outputs,
                summary.num_failed,
                "" if summary.won else "; another attempt's file was there first",
            )

    def _report_when_due(self) -> None:
        now = self._clock()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._link.report(self._report())

    def _report(self) -> WorkerReport:
        return WorkerReport(
            counts=self._engine.totals,
            num_uncommitted=sum(unit.num_terminal for unit in self._open),
            num_finished=self._num_finished,
            num_finished_tokens=self._num_finished_tokens,
        )
