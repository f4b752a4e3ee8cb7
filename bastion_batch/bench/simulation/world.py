"""The event loop: machines, the mishaps that befall them, and a policy that is told and acts.

    finish of a row    due report    mishap    arrival of a moved row
            +--------------+-----------+------------+
                           |
                  the policy acts: start, move

Time jumps from event to event. The world knows how long rows are; a policy is shown only what a
cluster would show it. Every row is finished once: finishing one twice is an error, and a worker
that is lost takes back what it had not yet made safe.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from bastion_batch.bench.simulation.machine import Machine
from bastion_batch.bench.simulation.outcome import Outcome, Trace
from bastion_batch.bench.simulation.workers import SimulatedWorker
from bastion_batch.bench.simulation.workload import Workload

TRANSFER_SECONDS = 0.3
"""From one worker's engine to the other's queue."""
REPORT_SECONDS = 1.05
"""Between two reports of a worker: a second, and the rest of a step."""


class Mishap(Enum):
    """What may happen to a worker."""

    LOST = "lost"
    """It is gone, with what its engine has."""
    NOTICED = "noticed"
    """It will be gone some seconds from now, and knows it."""
    JOINS = "joins"
    """It is there from now on only."""
    SICK = "sick"
    """Its rate falls to a part of what it was."""


class Incident(NamedTuple):
    """A mishap of one worker."""

    seconds: float
    worker: int
    mishap: Mishap
    value: float = 0.0
    """Seconds of notice; the part of its rate that is left."""


class Policy(Protocol):
    """Who decides which rows run where. It acts by `World.start` and `World.move`."""

    name: str

    def begin(self, world: "World") -> None:
        """The job begins; `joined` follows for every worker that is there."""
        ...

    def joined(self, worker: int) -> None:
        """A worker is there, and empty."""
        ...

    def freed(self, worker: int, finished: Sequence[int]) -> None:
        """Rows of a worker have ended: it has free slots."""
        ...

    def arrived(self, worker: int, row: int, num_tokens: int) -> None:
        """A row that was sent here is here, with its tokens; it is to be started."""
        ...

    def tick(self, worker: int) -> None:
        """A worker's turn to report, about once a second."""
        ...

    def noticed(self, worker: int, seconds: float) -> None:
        """A worker will be gone in so many seconds."""
        ...

    def lost(self, worker: int, running: Sequence[int]) -> None:
        """A worker is gone, with the rows that it was decoding."""
        ...


class World:
    """One run of one policy."""

    def __init__(
        self,
        workload: Workload,
        workers: Sequence[SimulatedWorker],
        incidents: Iterable[Incident] = (),
        *,
        tick_seconds: float = REPORT_SECONDS,
        sample_seconds: float | None = None,
    ) -> None:
        """Workers whose first incident is to join are absent until then."""
        self.workload = workload
        self.now = 0.0
        self.machines = tuple(Machine(worker, 0.0) for worker in workers)
        self.present = [True] * len(workers)
        self._lengths = workload.lengths_R.data
        self._prompts = workload.prompt_tokens_R.data
        self._is_finished = bytearray(len(workload.lengths_R))
        self._num_finished = 0
        self.num_moves = 0
        self._num_lost_tokens = 0
        self._traces = tuple(Trace(0.0) for _ in workers)
        self._tick_seconds = tick_seconds
        self._sample_seconds = sample_seconds
        self._events: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._versions = [0] * len(workers)
        self._finishing: int | None = None
        """A worker that is looked at again anyway."""
        for incident in incidents:
            self._at(incident.seconds, _INCIDENT, incident)
            if incident.mishap is Mishap.JOINS:
                self.present[incident.worker] = False

    # What a policy does

    def start(self, worker: int, row: int, num_tokens: int = 0) -> None:
        """Put a row into a worker's engine, with the tokens it has."""
        machine = self.machines[worker]
        assert machine.num_free > 0, "an engine has no more slots"
        assert not self._is_finished[row], "a row is decoded once"
        machine.advance(self.now)
        machine.start(row, num_tokens, self._lengths[row], self._prompts[row])
        trace = self._traces[worker]
        if trace.first_start is None:
            trace.first_start = self.now
        self._watch(worker)

    def move(self, source: int, row: int, target: int) -> None:
        """Take a running row out of one worker, with its tokens, and send it to another."""
        machine = self.machines[source]
        machine.advance(self.now)
        num_tokens = machine.remove(row)
        self._watch(source)
        self.num_moves += 1
        self.send(row, target, num_tokens)

    def send(self, row: int, target: int, num_tokens: int = 0) -> None:
        """Send a row that waits to another worker."""
        self._at(self.now + TRANSFER_SECONDS, _ARRIVAL, (target, row, num_tokens))

    def take_out(self, worker: int, row: int) -> int:
        """Take a running row out of a worker; returns its tokens, which are kept."""
        machine = self.machines[worker]
        machine.advance(self.now)
        num_tokens = machine.remove(row)
        self._watch(worker)
        return num_tokens

    def drop(self, worker: int, row: int) -> None:
        """Give up a running row, because another worker decodes it too."""
        machine = self.machines[worker]
        machine.advance(self.now)
        self._num_lost_tokens += machine.remove(row)
        self._watch(worker)

    def unfinish(self, row: int, num_tokens: int) -> None:
        """Lose a finished row: it was nowhere but on a worker that is gone."""
        assert self._is_finished[row], "what is lost was there"
        self._is_finished[row] = 0
        self._num_finished -= 1
        self._num_lost_tokens += num_tokens

    def retire(self, worker: int) -> None:
        """A worker leaves in order: it has nothing any more."""
        assert not self.machines[worker].rows, "a worker that leaves has given everything away"
        self.machines[worker].advance(self.now)
        self._leave(worker)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something called at a later time."""
        self._at(self.now + seconds, _CALL, call)

    def is_finished(self, row: int) -> bool:
        """Whether a row has ended."""
        return bool(self._is_finished[row])

    def has_finished(self) -> bool:
        """Whether every row has ended."""
        return self._num_finished == len(self._is_finished)

    # The loop

    def run(self, policy: Policy) -> Outcome:
        """Run the job to its end."""
        self._policy = policy
        policy.begin(self)
        for worker, present in enumerate(self.present):
            if present:
                self._join(worker)
        if self._sample_seconds is not None:
            self._at(0.0, _SAMPLE, None)
        while not self.has_finished():
            assert self._events, f"{policy.name}: nothing happens any more"
            self.now, _, kind, what = heapq.heappop(self._events)
            _HANDLERS[kind](self, what)
        return self._outcome()

    def _outcome(self) -> Outcome:
        for machine, trace in zip(self.machines, self._traces, strict=True):
            if trace.held_until is None:
                trace.samples.append((self.now, 0.0))
            machine.advance(self.now)
        return Outcome(
            makespan_seconds=self.now,
            num_finished=self._num_finished,
            num_moves=self.num_moves,
            num_lost_tokens=self._num_lost_tokens,
            tokens=sum(machine.tokens for machine in self.machines),
            machines=self.machines,
            traces=self._traces,
        )

    def _at(self, seconds: float, kind: int, what: Any) -> None:  # noqa: ANN401
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, kind, what))

    def _watch(self, worker: int) -> None:
        """Look again when the next row of this worker ends; what was set before is void."""
        if worker == self._finishing:
            return
        self._versions[worker] += 1
        when = self.machines[worker].next_finish()
        if when is not None:
            self._at(when, _FINISH, (worker, self._versions[worker]))

    def _finish(self, what: tuple[int, int]) -> None:
        worker, version = what
        if version != self._versions[worker]:
            return
        machine = self.machines[worker]
        machine.advance(self.now)
        finished = machine.pop_finished()
        for row in finished:
            assert not self._is_finished[row], "a row is finished once"
            self._is_finished[row] = 1
        self._num_finished += len(finished)
        self._finishing = worker
        self._policy.freed(worker, finished)
        self._finishing = None
        self._watch(worker)

    def _join(self, worker: int) -> None:
        self.present[worker] = True
        self.machines[worker].time = self.now
        self._traces[worker].held_from = self.now
        self._policy.joined(worker)
        offset = self._tick_seconds * (worker % 16) / 16
        self._at(self.now + offset, _TICK, worker)

    def _tick(self, worker: int) -> None:
        if self.present[worker]:
            self._policy.tick(worker)
            self._at(self.now + self._tick_seconds, _TICK, worker)

    def _incident(self, incident: Incident) -> None:
        worker = incident.worker
        self._traces[worker].marks.append((self.now, incident.mishap.value))
        match incident.mishap:
            case Mishap.JOINS:
                self._join(worker)
            case Mishap.SICK:
                self.machines[worker].advance(self.now)
                self.machines[worker].set_speed(incident.value)
                self._watch(worker)
            case Mishap.NOTICED:
                self._at(
                    self.now + incident.value,
                    _INCIDENT,
                    Incident(self.now + incident.value, worker, Mishap.LOST),
                )
                self._policy.noticed(worker, incident.value)
            case Mishap.LOST:
                self._lose(worker)

    def _lose(self, worker: int) -> None:
        if not self.present[worker]:
            return
        machine = self.machines[worker]
        machine.advance(self.now)
        running = list(machine.rows)
        self._num_lost_tokens += sum(machine.tokens_of(row) for row in running)
        machine.clear()
        self._watch(worker)
        self._leave(worker)
        self._policy.lost(worker, running)

    def _leave(self, worker: int) -> None:
        self.present[worker] = False
        self._traces[worker].held_until = self.now
        self._traces[worker].samples.append((self.now, 0.0))

    def _arrive(self, what: tuple[int, int, int]) -> None:
        self._policy.arrived(*what)

    def _call(self, call: Callable[[], None]) -> None:
        call()

    def _sample(self, _: None) -> None:
        for machine, trace, present in zip(self.machines, self._traces, self.present, strict=True):
            if present:
                trace.samples.append((self.now, len(machine.rows) / machine.worker.max_batch))
        assert self._sample_seconds is not None
        self._at(self.now + self._sample_seconds, _SAMPLE, None)


_FINISH, _TICK, _ARRIVAL, _INCIDENT, _CALL, _SAMPLE = range(6)
_HANDLERS = (
    World._finish, World._tick, World._arrive, World._incident, World._call, World._sample
)  # fmt: skip
