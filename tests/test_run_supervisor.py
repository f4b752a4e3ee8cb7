"""The driver's loop against a fleet and a coordinator that follow a script."""

import signal
from types import SimpleNamespace

import pytest

from bastion_batch.cluster.messages import AttemptRecord, Ended, Place, Placed, Progress
from bastion_batch.cluster.notices import Notice, Notices
from bastion_batch.cluster.placement import Placement
from bastion_batch.cluster.pools import Node, pools_of
from bastion_batch.cluster.restarts import Restarts
from bastion_batch.cluster.signals import StopSignals
from bastion_batch.cluster.supervisor import Supervisor, Watches
from bastion_batch.config import WorkersConfig
from bastion_batch.errors import DataError, JobFailedError, ModelError, OutputError
from bastion_batch.records import EngineTotals

NODES = {"w0": Node("n0", "host0", 4, 0), "w1": Node("n1", "host1", 4, 0)}
FIRST = 65536 + 1


class Cluster:
    """Both a fleet and a coordinator: what the supervisor did to them, and what they say."""

    def __init__(self):
        self.machines = list(NODES.values())
        self.units = 3
        self.done = 0
        self.failure = None
        self.finished_rows = set()
        self.dead_nodes = set()
        self.stuck_attempts = []
        self.homeless_wait = False
        self.events = []
        self.turns = []
        """Called one by one, one at each poll; after the last one nothing happens any more."""
        self.started, self.running, self.lost, self.dismissed, self.killed = [], {}, [], [], []
        self.loaded = set()
        self.waiting = set()
        """Attempts without a place."""
        self.told_to_end = []
        self.drained = self.stopped = False

    # As a fleet

    @property
    def alive(self):
        return list(self.running)

    def start(self, slot, spec, avoid, selector):
        worker, attempt = spec
        self.started.append((worker, attempt, slot.node and slot.node.node_id, set(avoid)))
        self.running[attempt] = worker, slot.node.node_id if slot.node else "elsewhere"
        if slot.node is None and self.homeless_wait:
            self.waiting.add(attempt)
            return
        self.loaded.add(attempt)
        self.events.append(Placed(worker, attempt, Place("host", 1), self.running[attempt][1]))

    def poll(self, timeout_seconds):
        assert self.turns, "the supervisor goes on for ever"
        self.turns.pop(0)(self)
        events, self.events = self.events, []
        return events

    def end(self, attempt, error=None):
        worker, _ = self.running.pop(attempt)
        self.waiting.discard(attempt)
        self.events.append(Ended(worker, attempt, error))

    def kill(self, attempts):
        for attempt in attempts:
            self.killed.append(attempt)
            self.end(attempt, JobFailedError("killed"))

    def tell_to_end(self, attempts):
        self.told_to_end += attempts

    def unplaced(self, after_seconds=0.0):
        return {} if after_seconds else {a: self.running[a][0] for a in self.waiting}

    def nodes(self):
        return [node for node in self.machines if node.node_id not in self.dead_nodes]

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
            1.0, None, None, None, None, None, failure=self.failure,
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


def supervise(
    cluster, *turns, notices=(), superseded_by=None, workers=None, may_grow=False, **watches
):
    signals = StopSignals(lambda line: None)
    cluster.signals = signals
    cluster.turns = list(turns)
    placement = Placement(pools_of(workers or WorkersConfig(count=2)), may_grow=may_grow)
    placement.look(cluster.machines)
    Supervisor(
        fleet=cluster,
        coordinator=cluster,
        placement=placement,
        refused_nodes=frozenset({"blind"}),
        restarts=Restarts(placement.slots, 1, pause_seconds=0.0),
        make_spec=lambda slot, attempt: (slot.worker, attempt),
        committed=lambda: set(range(cluster.done)),
        observe=lambda progress, attempts, held: setattr(cluster, "held", held),
        watches=Watches(
            signals,
            Notices([SimpleNamespace(poll=lambda: next(iter(notices), None))]),
            superseded_by=lambda: superseded_by,
            **{"look_seconds": 0.0} | watches,
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


def test_a_machine_that_comes_gets_a_worker(cluster):
    def come(cluster):
        cluster.machines.append(Node("n2", "host2", 4, 0))

    supervise(cluster, come, nothing, nothing, finish, nothing, workers=WorkersConfig())
    assert [(w, a, n) for w, a, n, _ in cluster.started] == [
        ("w0", FIRST, "n0"),
        ("w1", FIRST + 1, "n1"),
        ("w2", FIRST + 2, "n2"),
    ]


def test_a_refused_machine_gets_none(cluster):
    def come(cluster):
        cluster.machines.append(Node("blind", "blind", 4, 0))

    supervise(cluster, come, nothing, finish, nothing, workers=WorkersConfig())
    assert len(cluster.started) == 2


def test_what_workers_held_is_accounted_for_however_they_ended(cluster):
    def lose_one(cluster):
        cluster.end(FIRST, JobFailedError("preempted"))

    supervise(cluster, lose_one, nothing, finish, nothing, workers=WorkersConfig(price_per_hour=1))
    assert [(h.attempt, h.pool, h.holds) for h in cluster.held] == [
        (FIRST, "workers", False),
        (FIRST + 1, "workers", False),
        (FIRST + 2, "workers", False),
    ]
    assert all(h.cost is not None for h in cluster.held)


def test_a_notice_of_one_node_moves_its_workers_alone(cluster):
    def leave(cluster):
        assert cluster.dismissed == [FIRST]
        assert cluster.told_to_end == [], "it first hands over what it has"
        cluster.end(FIRST)

    notices = [Notice("spot", frozenset({"host0"}))]
    supervise(cluster, nothing, leave, nothing, finish, nothing, notices=notices)
    assert not cluster.drained
    assert cluster.started[2] == ("w0", FIRST + 2, None, {"blind", "n0"})
    assert [a for _, a, _, _ in cluster.started] == [FIRST, FIRST + 1, FIRST + 2]


def test_a_worker_that_still_loads_leaves_its_node_at_once(cluster):
    def load_slowly(cluster):
        cluster.loaded.discard(FIRST)

    notices = [Notice("spot", frozenset({"host0"}))]
    supervise(cluster, load_slowly, nothing, nothing, finish, nothing, notices=notices)
    assert cluster.killed == [FIRST]
    assert cluster.dismissed == [], "nobody knows it yet"
    assert cluster.started[2] == ("w0", FIRST + 2, None, {"blind", "n0"})


def test_a_worker_that_is_put_on_a_machine_that_goes_leaves_it(cluster):
    def place_late(cluster):
        cluster.events.append(Placed("w1", FIRST + 1, Place("host", 1), "n0"))

    notices = [Notice("spot", frozenset({"host0"}))]
    supervise(cluster, nothing, place_late, nothing, finish, nothing, notices=notices)
    assert cluster.dismissed == [FIRST, FIRST + 1]


def test_a_worker_that_follows_its_machine_does_not_join_another_there(cluster):
    """One CPU worker for each machine, and no second one where a machine is gone."""

    def lose_node(cluster):
        cluster.dead_nodes = {"n0"}
        cluster.end(FIRST, JobFailedError("its node is gone"))

    workers = WorkersConfig()
    supervise(cluster, lose_node, nothing, finish, nothing, workers=workers, may_grow=True)
    assert cluster.started[2] == ("w0", FIRST + 2, None, {"blind", "n1"})


def test_a_machine_that_came_since_the_last_look_is_its_workers_home(cluster):
    def lose_node(cluster):
        cluster.machines.append(Node("elsewhere", "new", 4, 0))
        cluster.dead_nodes = {"n0"}
        cluster.end(FIRST, JobFailedError("its node is gone"))

    def die(cluster):
        cluster.end(FIRST + 2, JobFailedError("preempted"))

    supervise(cluster, lose_node, nothing, die, nothing, finish, nothing, look_seconds=1e9)
    assert cluster.started[-1] == ("w0", FIRST + 3, "elsewhere", {"blind"})


ELSEWHERE = {"device": "cpu", "select": {"label": {"zone": "mars"}}, "count": 1}


def test_workers_without_a_machine_do_not_keep_a_job_whose_others_are_removed(cluster):
    cluster.homeless_wait = True

    def break_down(cluster):
        for attempt in set(cluster.alive) - cluster.waiting:
            cluster.end(attempt, ModelError("mamba"))

    workers = WorkersConfig(pools=[{"name": "here", "count": 2}, ELSEWHERE])
    with pytest.raises(ModelError, match="mamba"):
        supervise(cluster, break_down, nothing, nothing, workers=workers)
    cluster.__init__()
    cluster.homeless_wait = True
    turns = [break_down, nothing, nothing, finish, nothing]
    supervise(cluster, *turns, workers=workers, may_grow=True)
    assert cluster.done == cluster.units, "a machine might come, and does"
