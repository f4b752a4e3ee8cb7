"""A unit that a worker owns: its rows become requests, their outcomes become its files."""

from collections import deque
from collections.abc import Callable

from bastion_batch.cluster.messages import Lease, UnitSummary
from bastion_batch.config import JobConfig
from bastion_batch.core.noise import row_key
from bastion_batch.io.commit import commit_unit
from bastion_batch.io.plan import Plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitRows
from bastion_batch.io.sinks import UnitBuilder
from bastion_batch.records import Completion, Request, RowFault


class OpenUnit:
    """The outcomes of one leased unit, from its first row to its commit."""

    def __init__(
        self,
        lease: Lease,
        plan: Plan,
        rows: UnitRows,
        *,
        worker: str,
        attempt: int,
        device: str,
        job: JobConfig,
    ) -> None:
        self.lease = lease
        self._plan = plan
        self._rows = rows
        self._attempt = attempt
        self._job = job
        self._builder = UnitBuilder(plan, lease.unit, rows, worker, attempt, device)
        self._unfed = deque(self._builder.pending())
        self._num_outputs = len(rows.row_ids) * plan.samples_per_row
        self.num_terminal = self._num_outputs - len(self._unfed)
        self._num_failed = self.num_terminal
        self._rendered: tuple[int, tuple[int, ...] | RowFault] | None = None

    @property
    def num_unfed(self) -> int:
        """Outputs not yet requested."""
        return len(self._unfed)

    @property
    def complete(self) -> bool:
        """Whether every output is terminal."""
        return self._builder.complete

    def next_request(
        self, renderer: PromptRenderer, check: Callable[[int], RowFault | None]
    ) -> Request | None:
        """Take the next output: its request, or None if its row is at fault and so terminal."""
        position, sample_index = self._unfed.popleft()
        row_id = self._rows.row_ids[position]
        prompt = self._prompt(position, renderer)
        fault = prompt if isinstance(prompt, RowFault) else check(len(prompt))
        if fault is not None:
            num_tokens = 0 if isinstance(prompt, RowFault) else len(prompt)
            self._builder.add_fault(row_id, sample_index, fault, num_tokens)
            self.num_terminal += 1
            self._num_failed += 1
            return None
        assert not isinstance(prompt, RowFault)
        return Request(
            row_id=row_id,
            sample_index=sample_index,
            prompt_ids=prompt,
            sampling=self._job.decoding.sampling,
            noise_key=row_key(self._job.decoding.seed, row_id, sample_index),
        )

    def add(self, completion: Completion) -> None:
        """Take the outcome of a request."""
        self._builder.add(completion)
        self.num_terminal += 1
        self._num_failed += completion.fault is not None

    def commit(self, before_data: Callable[[], None] | None = None) -> UnitSummary:
        """Create the unit's files. Safe to repeat, by this or any other attempt."""
        data, steps = self._builder.tables()
        result = commit_unit(
            self._job.output.path,
            self._plan,
            self.lease.unit,
            self._attempt,
            data,
            steps,
            before_data=before_data,
        )
        return UnitSummary(self._num_outputs, self._num_failed, result.won)

    def _prompt(self, position: int, renderer: PromptRenderer) -> tuple[int, ...] | RowFault:
        """The row's prompt, rendered once for all its samples."""
        if self._rendered is None or self._rendered[0] != position:
            source = self._job.input.prompt or self._job.input.messages
            [row] = self._rows.table.select([source]).slice(position, 1).to_pylist()
            self._rendered = position, renderer.render(row)
        return self._rendered[1]
