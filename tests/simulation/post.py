"""Messages between processes, with the delays of a network and the promises of Ray.

Those from one process to another arrive in the order in which they were sent, those of different
processes in any. What was sent arrives although its sender dies, and nowhere if its reader does.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bastion_batch.cluster.mail import Ack, Mail, Task
from bastion_batch.io.journal import JournalReader
from bastion_batch.io.layout import data_name
from bastion_batch.io.plan_file import load_plan
from bastion_batch.records import RowKey
from simulation.settings import Settings
from simulation.watched import WatchedStore
from simulation.world import Process, Violation, World

if TYPE_CHECKING:
    from simulation.cluster import Life

GOODBYE_SECONDS = 10.0


class CoordinatorGone(Exception):
    """What a call to an actor of a dead driver ends with."""


class OwnerOfAbsent(NamedTuple):
    """An attempt that owns a unit of which others have rows, or had until it was killed."""

    attempt: int
    num_acknowledged: int
    """Rows of the unit that it has acknowledged, up to two."""


class Post:
    """The network, and a look at what goes over it."""

    def __init__(self, world: World, memory: WatchedStore, settings: Settings) -> None:
        self.world = world
        self.acknowledged_at_death: set[int] = set()
        """Of `OwnerOfAbsent` that died."""
        self.num_tasks = 0
        """Rows that were sent to another worker."""
        self.num_continued = 0
        """Those of them that had tokens."""
        self._memory = memory
        self._settings = settings
        self._sent: dict[tuple[int, int], dict[RowKey, bool]] = {}
        """Owner and unit: the rows sent away, and whether they were acknowledged."""

    def delay(self) -> float:
        """How long a message takes."""
        return self.world.soon(self._settings.delay)

    def loses(self, attempt: int, mail: Mail) -> bool:
        """Take a message of one worker to another; whether it gets lost on the way.

        Raises:
            Violation: what it says is not so.
        """
        if isinstance(mail, Task):
            self.num_tasks += 1
            self.num_continued += mail.row.num_tokens > 0
            self._sent.setdefault((attempt, mail.unit), {})[mail.row.key] = False
        if isinstance(mail, Ack):
            self._sent.setdefault((attempt, mail.unit), {}).update(dict.fromkeys(mail.keys, True))
            if self._is_open(mail.unit):
                self.require_journaled(mail.unit, mail.keys, "acknowledged")
        return self.world.random.random() < self._settings.loss_rate

    def repeats(self) -> bool:
        """Whether a message arrives once more, long after, whatever came in between."""
        return self.world.random.random() < self._settings.repeat_rate

    def owners_of_absent(self) -> Iterator[OwnerOfAbsent]:
        """Owners of open units of which not all rows sent away were acknowledged."""
        for (attempt, unit), acknowledged in self._sent.items():
            if self._is_open(unit) and not all(acknowledged.values()):
                yield OwnerOfAbsent(attempt, min(2, sum(acknowledged.values())))

    def died(self, attempt: int) -> None:
        """Note the death of a worker."""
        self.acknowledged_at_death.update(
            owner.num_acknowledged for owner in self.owners_of_absent() if owner.attempt == attempt
        )

    def _is_open(self, unit: int) -> bool:
        return data_name(unit) not in self._memory.contents

    def require_journaled(self, unit: int, keys: Collection[RowKey], what: str) -> None:
        """The outcomes of these rows are in the journal, except of those given up as poison."""
        plan = load_plan(self._memory)
        assert plan is not None
        journaled = JournalReader(self._memory, plan).read(unit).outcomes
        lost = {k for k in keys if k not in journaled and not self._memory.may_be_poison(k)}
        if lost:
            raise Violation(f"{what}, and in no file: {lost}")


class SimulatedLink:
    """A worker's line: see `bastion_batch.cluster.links.Link`."""

    def __init__(self, post: Post, life: "Life", process: Process, attempt: int) -> None:
        self._post = post
        self._world = post.world
        self._life = life
        self._process = process
        self._attempt = attempt
        self._name = f"m{attempt}"
        self._reply: Any = None
        self._directions: Any = None
        self._num_under_way = 0
        self._arrivals: dict[int | None, float] = {}

    def register(self, worker, info):
        self._call("register", worker, self._attempt, info)

    def ask(self):
        self._call("lease", self._attempt, answer=self._take_reply)

    def answer(self, timeout_seconds):
        self._process.wait(timeout_seconds, lambda: self._reply is not None)
        self._require_coordinator()
        reply, self._reply = self._reply, None
        return reply

    def committed(self, lease, summary):
        self._call("committed", self._attempt, lease.unit, lease.epoch, summary)

    def give_back(self, lease):
        self._call("give_back", self._attempt, lease.unit, lease.epoch)

    def report(self, report):
        self._life.note_rows(self._attempt, report.rows)
        self._call("report", self._attempt, report, answer=self._take_directions)

    def directions(self):
        self._require_coordinator()
        directions, self._directions = self._directions, None
        return directions

    def send(self, attempt, mail):
        self._process.check_alive()
        self._note("to", attempt, mail)
        if not self._post.loses(self._attempt, mail):
            self._send(attempt, lambda: self._life.deliver(attempt, mail))
        if self._post.repeats():
            self._world.at(self._world.later(2.0), lambda: self._life.deliver(attempt, mail))

    def close(self):
        self._process.wait(GOODBYE_SECONDS, lambda: not self._num_under_way)

    def _call(self, method, *arguments, answer=None):
        self._process.check_alive()
        self._num_under_way += 1

        def arrive():
            self._num_under_way -= 1
            self._process.wake()
            if not self._life.process.alive:
                return
            self._note(method, *arguments)
            call = getattr(self._life.coordinator, method)
            result = call(*arguments, self._world.now)
            if answer is not None:
                self._world.at(self._post.delay(), lambda: answer(result))

        self._send(None, arrive)

    def _send(self, receiver, function):
        """Call a function after everything that was sent to this receiver before."""
        arrival = max(self._world.now + self._post.delay(), self._arrivals.get(receiver, 0.0))
        self._arrivals[receiver] = arrival
        self._world.at_time(arrival, function)

    def _take_reply(self, reply):
        self._note("gets", reply)
        self._reply = reply
        self._process.wake()

    def _take_directions(self, directions):
        before = self._directions
        self._directions = directions if before is None else before.followed_by(directions)

    def _require_coordinator(self):
        if self._life.gone:
            raise CoordinatorGone

    def _note(self, *what):
        self._world.note(self._name, *what)
