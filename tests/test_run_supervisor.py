"""The driver's loop against a fleet and a coordinator that follow a script."""

import signal
from types import SimpleNamespace

import pytest

from bastion_batch.cluster.messages import AttemptRecord, Ended, Place, Placed, Progress
from bastion_batch.cluster.notices import Notice, Notices
from bastion_batch.cluster.placement import Node, Slot
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import StopSignals
from bastion_batch.cluster.supervisor import Supervisor, Watches
from bastion_batch.errors import DataError, JobFailedError, ModelError, OutputError
from bastion_batch.records import EngineTotals

NODES = {"w0": Node("n0", "host0", 4, 0), "w1": Node("n1", "host1", 4, 0)}
FIRST = 65536 + 1


class Cluster:
    """Both a fleet and a coordinator: what the supervisor did to them, and what they say."""

    def __init__(self):
        self.units = 3
        self.done = 0
        self.failure = None
        self.finished_rows = set()
        self.dead_nodes = set()
        self.stuck_attempts = []
        self.events = []
        self.turns = []
        """Called one by one, one at each poll; after the last one nothing happens any more."""
        self.started, self.running, self.lost, self.dismissed, self.killed = [], {}, [], [], []
        self.loaded = set()
        self.told_to_end = []
        self.drained = self.stopped = False

    # As a fleet

    @property
    def alive(self):
        return list(self.running)

    def start(self, slot, spec, avoid):
        worker, attempt = spec
        self.started.append((worker, attempt, slot.node and slot.node.node_id, set(avoid)))
        self.running[attempt] = worker, slot.node.node_id if slot.node else "elsewhere"
        self.loaded.add(attempt)
        self.events.append(Placed(worker, attempt, Place("host", 1)))

    def poll(self, timeout_seconds):
        assert self.turns, "the supervisor goes on for ever"
        self.turns.pop(0)(self)
        events, self.events = self.events, []
        return events

    def end(self, attempt, error=None):
        worker, _ = self.running.pop(attempt)
        self.events.append(Ended(worker, attempt, error))

    def kill(self, attempts):
        for attempt in attempts:
            self.killed.append(attempt)
            self.end(attempt, JobFailedError("killed"))

    def tell_to_end(self, attempts):
        self.told_to_end += attempts

    def unplaced(self, after_seconds):
        return []

    def node_ids(self, names):
        return frozenset(n.node_id for n in NODES.values() if {n.node_id, n.host} & set(names))

    def on_nodes(self, node_ids):
        return [a for a, (_, node) in self.running.items() if node in node_ids]

    def is_live(self, node_id):
        return node_id not in self.dead_nodes

    def stop(self):
        self.stopped = True

    # As a coordinator

    def progress(self):
        return Progress(
            9, 3 * self.done, 3 * self.done, 0, self.units, self.done, len(self.running), 0,
            1.0, None, None, None, None, None, self.failure,
        )  # fmt: skip

    def attempts(self):
        return [
            AttemptRecord("w", a, a in self.running, {}, EngineTotals(), 0, a in self.finished_rows)
            for a in sorted(self.loaded)
        ]

    def worker_lost(self, attempt, committed):
        self.lost.append(attempt)

    def drain(self):
        self.drained = True

    def dismiss(self, attempt):
        self.dismissed.append(attempt)

    def stuck(self, seconds):
        return [a for a in self.stuck_attempts if a in self.running]


@pytest.fixture
def cluster():
    return Cluster()


def nothing(cluster):
    """A turn without news."""


def finish(cluster):
    cluster.done = cluster.units
    for attempt in cluster.alive:
        cluster.end(attempt)


def supervise(cluster, *turns, notices=(), superseded_by=None, **watches):
    signals = StopSignals(lambda line: None)
    cluster.signals = signals
    cluster.turns = list(turns)
    slots = {name: Slot(name, node, "cpu", 1) for name, node in NODES.items()}
    Supervisor(
        fleet=cluster,
        coordinator=cluster,
        slots=slots,
        refused_nodes=frozenset({"blind"}),
        restarts=Restarts(slots, 1, pause_seconds=0.0),
        make_spec=lambda slot, attempt: (slot.worker, attempt),
        committed=lambda: set(range(cluster.done)),
        observe=lambda progress, attempts: None,
        watches=Watches(
            signals,
            Notices([SimpleNamespace(poll=lambda: next(iter(notices), None))]),
            superseded_by=lambda: superseded_by,
            look_seconds=0.0,
            **watches,
        ),
    ).run()


def test_it_returns_when_every_unit_is_committed(cluster):
    supervise(cluster, nothing, finish, nothing)
    assert cluster.started == [
        ("w0", FIRST, "n0", {"blind"}),
        ("w1", FIRST + 1, "n1", {"blind"}),
    ]
    assert cluster.stopped
    assert not cluster.drained


def test_a_worker_whose_node_is_dead_goes_elsewhere_but_not_where_it_was_refused(cluster):
    def lose_node(cluster):
        cluster.dead_nodes = {"n0"}
        cluster.end(FIRST, JobFailedError("its node is gone"))

    supervise(cluster, lose_node, nothing, finish, nothing)
    assert cluster.started[2] == ("w0", FIRST + 2, None, {"blind"})


def end_all(error):
    def turn(cluster):
        for attempt in cluster.alive:
            cluster.end(attempt, error)

    return turn


def test_workers_that_never_finish_a_row_are_given_up(cluster):
    broken = end_all(RuntimeError("CUDA driver initialization failed"))
    with pytest.raises(JobFailedError, match=r"no worker is left.*RuntimeError: CUDA driver"):
        supervise(cluster, *[broken] * 10)
    assert len(cluster.started) == 6
    assert cluster.stopped


def test_workers_that_finish_rows_may_die_for_ever(cluster):
    def die_after_a_row(cluster):
        cluster.finished_rows.update(cluster.alive)
        end_all(JobFailedError("preempted"))(cluster)

    supervise(cluster, *[die_after_a_row] * 10, finish, nothing)
    assert len(cluster.started) == 22


@pytest.mark.parametrize("error", [ModelError("mamba"), OutputError("not shared")])
def test_what_no_start_mends_is_not_started_again(cluster, error):
    with pytest.raises(type(error), match=str(error)):
        supervise(cluster, end_all(error), nothing)
    assert len(cluster.started) == 2


def test_a_changed_input_ends_the_job_at_once(cluster):
    def change(cluster):
        cluster.end(FIRST, DataError("in.jsonl has changed"))

    with pytest.raises(DataError, match="changed"):
        supervise(cluster, change, nothing)
    assert cluster.stopped


def test_a_stuck_worker_is_killed_once_and_replaced(cluster):
    def hang(cluster):
        cluster.stuck_attempts = [FIRST]

    supervise(cluster, hang, nothing, nothing, finish, nothing)
    assert cluster.killed == [FIRST]
    assert cluster.lost[0] == FIRST
    assert cluster.started[2][:2] == ("w0", FIRST + 2)


def test_a_worker_that_does_not_load_its_models_is_killed_and_replaced(cluster):
    def hang(cluster):
        cluster.loaded.discard(FIRST)

    supervise(cluster, hang, nothing, nothing, finish, nothing, start_seconds=0.0)
    assert cluster.killed == [FIRST]
    assert cluster.started[2][:2] == ("w0", FIRST + 2)


def test_the_breaker_ends_the_job_in_order(cluster):
    def trip(cluster):
        cluster.failure = "20 of the first 20 outputs failed, null_prompt: no prompt"

    with pytest.raises(JobFailedError, match="stopped: 20 of the first 20 outputs failed"):
        supervise(cluster, trip, end_all(None), nothing)
    assert cluster.drained
    assert len(cluster.started) == 2, "none is started again"


def test_a_driver_that_is_superseded_stops(cluster):
    driver = SimpleNamespace(name="process 7 on far")
    with pytest.raises(JobFailedError, match="another driver took over: process 7 on far"):
        supervise(cluster, nothing, end_all(None), nothing, superseded_by=driver)
    assert cluster.drained


@pytest.mark.parametrize(
    ("signum", "kind", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
)
def test_a_signal_ends_the_job_in_order(cluster, signum, kind, code):
    def send(cluster):
        cluster.signals.received = signum

    with pytest.raises(kind) as ended:
        supervise(cluster, send, nothing, nothing, end_all(None), nothing)
    assert getattr(ended.value, "code", None) == code
    assert cluster.drained
    assert cluster.told_to_end == [FIRST, FIRST + 1]
    assert cluster.killed == [], "they journaled and left"


def test_the_end_is_not_waited_for_longer_than_told(cluster, caplog):
    def send(cluster):
        cluster.signals.received = signal.SIGTERM

    with pytest.raises(SystemExit):
        supervise(cluster, send, nothing, drain_seconds=0.0)
    assert "2 workers did not end in time" in caplog.text
    assert cluster.stopped


def test_a_worker_that_still_loads_is_not_waited_for(cluster):
    def send(cluster):
        cluster.loaded.discard(FIRST)
        cluster.signals.received = signal.SIGTERM

    with pytest.raises(SystemExit):
        supervise(cluster, send, nothing, end_all(None), nothing)
    assert cluster.killed == [FIRST]


def test_a_job_that_is_complete_when_it_has_ended_is_finished(cluster):
    def send(cluster):
        cluster.signals.received = signal.SIGTERM

    supervise(cluster, send, finish, nothing)
    assert cluster.drained


def test_a_notice_to_the_job_is_as_a_sigterm(cluster):
    notices = [Notice("/out/_bastion/stop is there")]
    with pytest.raises(SystemExit) as ended:
        supervise(cluster, nothing, end_all(None), nothing, notices=notices)
    assert ended.value.code == 143


def test_a_notice_of_one_node_moves_its_workers_alone(cluster):
    def leave(cluster):
        assert cluster.dismissed == cluster.told_to_end == [FIRST]
        cluster.end(FIRST)

    notices = [Notice("spot", frozenset({"host0"}))]
    supervise(cluster, nothing, leave, nothing, finish, nothing, notices=notices)
    assert not cluster.drained
    assert cluster.started[2] == ("w0", FIRST + 2, None, {"blind", "n0"})
    assert [a for _, a, _, _ in cluster.started] == [FIRST, FIRST + 1, FIRST + 2]
