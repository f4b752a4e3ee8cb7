"""Whatever ends a worker, or a row: every row is answered once, with its own text.

Workers in this process, real files, scripted engines that do harm, and a clock that the test moves.
"""

import errno
import logging
from random import Random

import pytest
from balances import MovingBalance
from local_cluster import LocalCluster, make_job, prompts, row_id
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.cluster.engines import PretrainedEngines
from bastion_batch.cluster.mail import Ack, Ask, Holding, Outcomes, Returned, Task
from bastion_batch.cluster.messages import Directions
from bastion_batch.cluster.scripted import ScriptedEngines, scripted_ids
from bastion_batch.io.commit import committed_units
from bastion_batch.io.journal import JournalReader
from bastion_batch.io.layout import JOURNAL
from bastion_batch.io.results import load_steps
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import LocalStore


def cluster(directory, count=20, **options):
    sections = {k: options.pop(k) for k in ("decoding", "output", "limits") if k in options}
    rows = options.pop("rows", None) or prompts(count)
    return LocalCluster(make_job(directory, rows, **sections), **options)


def journal(c):
    return LocalStore(c.job.output.path).names(JOURNAL)


def entries(c, unit=0):
    return JournalReader(LocalStore(c.job.output.path), c.plan).read(unit)


def live_rows(c, attempt):
    return [row for row in c.workers[attempt]._exchange.in_flight() if row.live]


LONG = {"max_new_tokens": 300}


def longest(c, owner):
    """Of the rows that an owner decodes, the one with most tokens to come."""
    running = list(c.workers[owner]._live.rows())[: c.max_batch]
    own = [live.row for live in running if live.unit in c.workers[owner]._exchange.open]
    chosen = max(own, key=lambda row: len(scripted_ids(row.exported.request)))
    return next(row for row in live_rows(c, owner) if (row.row_id, row.sample_index) == chosen.key)


def send_row(c, owner, to):
    """Move one live row of an owner, and wait until it is in the other's engine."""
    c.until(lambda: len(live_rows(c, owner)) >= 4, owner)
    c.turns(3, owner)
    row = longest(c, owner)
    c.move(row, to)
    c.until(lambda: any(r.row_id == row.row_id for r in live_rows(c, to)), owner, to, limit=100)
    return row


# Ownership


def test_a_moved_row_goes_on_with_its_tokens_and_counts_its_move(tmp_path):
    c = cluster(tmp_path, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    row = send_row(c, first, second)
    assert c.post.of(Task)[0].row.num_tokens > 1
    c.run()
    moved = {r["row_id"]: r for r in c.check()}[row.row_id]
    assert (moved["migrations"], moved["worker"]) == (1, "w1")
    assert c.post.of(Ack)


def test_a_decoder_keeps_outcomes_until_the_owner_has_them_safe(tmp_path):
    c = cluster(tmp_path, 5, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    row = send_row(c, first, second)
    c.post.lose = lambda to, mail: isinstance(mail, Outcomes)
    c.until(lambda: c.post.of(Outcomes), first, second)
    kept = [r for r in c.workers[second]._exchange.in_flight() if r.row_id == row.row_id]
    assert [r.live for r in kept] == [False]
    c.post.lose = lambda to, mail: False
    c.run()  # the owner asks after the row
    assert len(c.post.of(Ask)) >= 1
    assert c.check()


def test_rows_of_a_lost_decoder_are_decoded_again_from_where_they_were_sent(tmp_path):
    c = cluster(tmp_path, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    row = send_row(c, first, second)
    c.kill(second)
    c.run()
    assert {r["row_id"]: r["worker"] for r in c.check()}[row.row_id] == "w0"


@pytest.mark.parametrize("num_acknowledged", [0, 1, 2])
def test_a_new_owner_gets_the_rows_that_others_have(tmp_path, num_acknowledged):
    c = cluster(tmp_path, 10, max_batch=8, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    rows = [send_row(c, first, second) for _ in range(3)]
    units = {row.unit for row in rows}
    if num_acknowledged:
        c.until(lambda: len(c.post.of(Outcomes)) >= num_acknowledged, second)
        c.workers[first]._read_mail()
        c.workers[first]._keeper.flush()
    assert sum(len(mail.keys) for mail in c.post.of(Ack)) == num_acknowledged
    c.kill(first)
    third = c.start("w2")
    c.until(lambda: units <= set(c.workers[third]._exchange.open), third)
    c.run()
    assert third in {mail.owner for mail in c.post.of(Ask)}
    by = {row["row_id"]: (row["worker"], row["migrations"]) for row in c.check()}
    assert {by[row.row_id] for row in rows} == {("w1", 1)}


def test_mail_of_a_former_owner_is_dropped_and_counted(tmp_path):
    c = cluster(tmp_path, 5, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    row = send_row(c, first, second)
    zombie = c.kill(first)
    third = c.start("w2")
    guests = c.workers[second]._exchange.guests
    c.until(lambda: row.unit in guests and guests[row.unit].owner == third)
    stale = c.post.of(Task)[0]
    before = c.workers[second]._exchange.num_dropped
    c.workers[second].deliver(stale)
    c.turn(second)
    assert c.workers[second]._exchange.num_dropped == before + 1
    zombie.turn()  # it lives on and changes nothing
    c.run()
    c.check()


def test_lost_and_repeated_mail_changes_nothing(tmp_path):
    c = cluster(tmp_path, 30, max_batch=6)
    attempts = [c.start(f"w{i}") for i in range(3)]
    counter = iter(range(10**6))
    c.post.lose = lambda to, mail: next(counter) % 3 == 0
    for turn in range(400):
        if not c.workers:
            break
        if turn % 5 == 0:
            for attempt in [a for a in attempts if a in c.workers]:
                for row in live_rows(c, attempt)[:1]:
                    target = attempts[turn // 5 % 3]
                    c.move(row, target)
        if c.post.sent and turn % 7 == 0:
            to, mail = c.post.sent[turn % len(c.post.sent)]
            if to in c.workers:
                c.workers[to].deliver(mail)
        c.turn()
    c.run()
    c.check()


def test_a_row_called_back_from_one_decoder_goes_to_the_next(tmp_path):
    c = cluster(tmp_path, 10, decoding=LONG)
    first, second, third = (c.start(f"w{i}") for i in range(3))
    row = send_row(c, first, second)
    c.turns(3, second)
    c.move(row, third)
    c.until(lambda: any(r.row_id == row.row_id for r in live_rows(c, third)), first, second, third)
    assert c.post.of(Returned)
    c.run()
    assert {r["row_id"]: r["migrations"] for r in c.check()}[row.row_id] == 2


class Chance:
    """Moves, deaths, dismissals, lost mail and full journals, at random."""

    def __init__(self, c, seed):
        self.c = c
        self.random = Random(seed)
        self.unnoticed = []
        c.post.lose = lambda to, mail: self.random.random() < 0.1

    def act(self):
        action = self.random.choice([self.move] * 6 + [self.kill, self.dismiss, self.notice])
        if self.c.workers:
            action(self.random.choice(list(self.c.workers)))
        while len(self.c.workers) < 3:
            self.c.start(f"w{self.random.randrange(3)}")

    def move(self, attempt):
        rows = live_rows(self.c, attempt)
        if rows:
            row = self.random.choice(rows)
            target = self.random.choice(list(self.c.workers))
            self.c.move(row, target)

    def kill(self, attempt):
        if self.random.random() < 0.5:
            self.c.workers[attempt]._keeper.flush()
        self.c.kill(attempt, noticed=False)
        self.unnoticed.append(attempt)

    def dismiss(self, attempt):
        self.c.coordinator.dismiss(attempt)
        self.unnoticed.append(attempt)

    def notice(self, _):
        if self.unnoticed:
            self.c.lose(self.unnoticed.pop(0))


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_of_moves_and_deaths_ends_with_every_row_once(tmp_path, seed):
    decoding = {"max_new_tokens": 100, "samples_per_row": 2}
    c = cluster(tmp_path, 20, decoding=decoding)
    chance = Chance(c, seed)
    for _ in range(25):
        chance.act()
        c.turns(chance.random.randrange(12))
        if c.progress().finished:
            break
    for attempt in chance.unnoticed:
        c.workers.pop(attempt, None)
        c.lose(attempt)
    c.post.lose = lambda to, mail: False
    if not c.workers:
        c.start("w0")
    c.until(lambda: c.progress().finished)
    c.run()
    c.check()


# The journal in a worker


def test_a_killed_workers_journaled_rows_are_not_decoded_again(tmp_path):
    c = cluster(tmp_path, 5, max_batch=2)
    first = c.start("w0")
    c.until(lambda: c.workers[first]._reporter.num_finished == 3)
    c.workers[first]._keeper.flush()
    c.kill(first)
    second = c.start("w1")
    c.run()
    by = [row["worker"] for row in c.check()]
    assert sorted(by) == ["w0", "w0", "w0", "w1", "w1"]
    assert second not in c.workers
    assert journal(c) == [f"{JOURNAL}/w0-{first}-0.arrow"]


def test_the_journal_is_written_every_half_minute_and_goes_with_its_units(tmp_path):
    c = cluster(tmp_path, 5, max_batch=2)
    first = c.start("w0")
    c.until(lambda: c.workers[first]._reporter.num_finished == 1)
    assert journal(c) == []
    c.clock.now += 31.0
    c.turn()
    assert len(journal(c)) == 1
    c.run()
    assert journal(c) == []
    c.check()


class BrokenStore(LocalStore):
    """A store whose journal, or whose data, finds no room."""

    folder = JOURNAL

    def put(self, name, payload):
        if name.startswith(self.folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(name, payload)

    def put_if_absent(self, name, payload):
        if name.startswith(self.folder):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return super().put_if_absent(name, payload)


def test_a_full_disk_in_the_journal_is_survived(tmp_path, caplog):
    c = cluster(tmp_path, 10)
    first = c.start("w0", store=BrokenStore(c.job.output.path))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            c.turn(first)
            c.clock.now += 31.0
        c.run()
    assert caplog.text.count("the journal cannot be written") == 1
    c.check()


# The end in order


def test_told_to_end_a_worker_journals_rows_and_tokens_and_the_next_goes_on(tmp_path):
    c = cluster(tmp_path, 20)
    first = c.start("w0")
    c.until(
        lambda: (
            len(committed_units(c.job.output.path)) == 1 and c.workers[first]._reporter.num_finished
        )
    )
    c.turns(4)
    c.workers[first].deliver(Directions(drain=True))
    c.turn()
    assert first not in c.workers
    known = [entries(c, unit) for unit in range(4)]
    num_prefixes = sum(len(of_unit.prefixes) for of_unit in known)
    assert num_prefixes >= 2
    later = LocalCluster(c.job, invocation=2)
    later.start("w0")
    later.run()
    rows = later.check()
    assert sum(row["migrations"] for row in rows) == num_prefixes


def test_at_the_end_complete_units_are_committed(tmp_path):
    c = cluster(tmp_path, 5)
    first = c.start("w0")
    worker = c.workers[first]
    c.until(lambda: worker._reporter.num_finished == 4, first)
    c.coordinator.drain()
    while worker._exchange.open and not next(iter(worker._exchange.open.values())).complete:
        worker._step()
    c.turns(40)
    assert committed_units(c.job.output.path) == {0}
    assert not c.workers


def test_a_worker_that_must_go_leaves_its_work_to_the_others(tmp_path):
    c = cluster(tmp_path, 20, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    to_go = send_row(c, first, second)
    c.turns(2)
    lent = send_row(c, second, first)
    c.coordinator.dismiss(first)
    c.until(lambda: first not in c.workers)
    assert [mail for mail in c.post.of(Returned) if mail.sender == first]
    c.lose(first)
    c.run()
    rows = {row["row_id"]: row for row in c.check()}
    assert rows[to_go.row_id]["worker"] == "w1"
    assert rows[lent.row_id]["worker"] == "w1"


def test_a_worker_that_must_go_hands_its_rows_over_with_their_tokens(tmp_path):
    c = cluster(tmp_path, 20, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: len(live_rows(c, first)) >= 4)
    c.turns(4)
    running = {row.row_id: row for row in live_rows(c, first) if row.num_tokens > 4}
    c.coordinator.dismiss(first)
    for row in running.values():
        c.move(row, second)
    c.until(lambda: first not in c.workers)
    sent = {task.row.key[0]: task.row.num_tokens for task in c.post.of(Task)}
    assert len(sent) >= 2
    assert all(num_tokens >= running[name].num_tokens for name, num_tokens in sent.items())
    c.lose(first)
    c.run()
    rows = {row["row_id"]: row for row in c.check()}
    assert all((rows[n]["worker"], rows[n]["migrations"]) == ("w1", 1) for n in sent)
    assert all(rows[n]["worker"] == "w0" for n in running.keys() - sent.keys()), "ended meanwhile"


def test_the_balance_itself_sends_the_rows_of_who_must_go(tmp_path):
    engines = ScriptedEngines(max_batch=4, step_seconds=0.004)
    c = cluster(tmp_path, 20, decoding=LONG, balance=MovingBalance)
    first, _ = (c.start(f"w{i}", engines=engines) for i in range(2))
    c.until(lambda: len([r for r in live_rows(c, first) if r.num_tokens > 20]) >= 3)
    c.coordinator.dismiss(first)
    c.until(lambda: first not in c.workers)
    sent = [task.row for task in c.post.of(Task) if task.owner == first]
    assert any(row.num_tokens > 20 for row in sent)
    c.lose(first)
    c.run()
    rows = {row["row_id"]: row for row in c.check()}
    assert any(rows[row.key[0]]["migrations"] for row in sent if row.num_tokens > 20)


# Sick workers


def test_rows_at_a_sick_worker_are_decoded_again_and_answered_once(tmp_path):
    c = cluster(tmp_path, 10, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    row = send_row(c, first, second)
    c.balance.sick_workers = frozenset({second})
    c.until(lambda: any(r.row_id == row.row_id for r in live_rows(c, first)), first)
    c.balance.sick_workers = frozenset()
    c.run()  # the sick one comes round, and both answer
    assert c.post.of(Outcomes)
    c.check()


@pytest.mark.parametrize("wakes", [False, True])
def test_units_of_a_silent_owner_are_committed_by_another(tmp_path, wakes):
    c = cluster(tmp_path, 10, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: len(c.workers[first]._exchange.open) == 2, first)
    c.turns(5, first)
    silent = c.workers.pop(first)
    c.balance.to_take_back = [0, 1]
    c.until(lambda: set(c.workers[second]._exchange.open) == {0, 1})
    if wakes:
        c.workers[first] = silent
        c.turns(30, first)
        assert not silent._exchange.open, "a helper now"
        assert {mail.owner for mail in c.post.of(Ask)} <= {second}
        c.run()
    else:
        c.until(lambda: c.progress().finished)
        c.lose(first)
        silent.close()
        c.run()
    rows = c.check()
    assert {row["worker"] for row in rows} <= {"w0", "w1"}


def test_a_file_of_a_silent_owner_stands(tmp_path):
    c = cluster(tmp_path, 5)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: c.workers[first]._exchange.open, first)
    silent = c.workers.pop(first)
    c.balance.to_take_back = [0]
    c.until(lambda: c.workers[second]._exchange.open)
    while silent._exchange.open:  # its answers do not come, and it ends its unit
        silent._step()
        silent._feeder.feed()
        silent._keeper.commit_complete()
    assert c.progress().finished
    c.workers[first] = silent
    c.run()
    assert {row["worker"] for row in c.check()} == {"w0"}


# Faults of the engine, and of rows


def test_an_engine_that_ends_costs_nothing_that_was_finished(tmp_path):
    c = cluster(tmp_path, 10, max_batch=3)
    first = c.start("w0", harm={row_id(4): "raise"})
    assert "illegal memory access" in str(c.crash(first))
    num_journaled = len(entries(c, 0).outcomes)
    assert num_journaled >= 1
    c.start("w1")
    c.run()
    by = [row["worker"] for row in c.check()]
    assert by.count("w0") == num_journaled


def test_a_row_that_ends_three_engines_on_two_workers_is_poison(tmp_path):
    c = cluster(tmp_path, 10)
    harm = {row_id(3): "raise"}
    c.kill(c.start("w1"))  # so that there are two
    for name in ("w0", "w1", "w0"):
        c.crash(c.start(name, harm=harm))
    c.start("w1", harm=harm)
    c.run()
    rows = c.check()
    assert {r["label"]: r["error_kind"] for r in rows if r["error_kind"]} == {3: "poison"}
    assert rows[3]["error"].startswith("3 engines of w0, w1 ended")
    assert c.coordinator.progress(0.0).num_failed == 1


def test_the_third_engine_meets_a_suspect_alone(tmp_path):
    c = cluster(tmp_path, 10)
    harm = {row_id(3): "raise"}
    for name in ("w0", "w1"):
        c.crash(c.start(name, harm=harm))
    third = c.start("w0", harm=harm)
    error = c.crash(third)
    assert "illegal" in str(error)
    ends = entries(c, 0).ends | entries(c, 1).ends
    blamed_thrice = [
        s
        for s in c.coordinator._suspicions.of(0) + c.coordinator._suspicions.of(1)
        if len(s.ends) == 3
    ]
    assert [s.row_id for s in blamed_thrice] == [row_id(3)]
    assert ends, "what was known before is journaled"


def test_poison_is_remembered_by_the_next_invocation(tmp_path):
    c = cluster(tmp_path, 10)
    harm = {row_id(3): "raise"}
    for name in ("w0", "w1", "w0"):
        c.crash(c.start(name, harm=harm))
    fourth = c.start("w1", harm=harm)
    c.turn(fourth)  # it opens the units, and journals what it was told of them
    c.kill(fourth, noticed=False)
    later = LocalCluster(c.job, invocation=2)
    later.start("w0", harm=harm)
    later.start("w1", harm=harm)
    later.run()
    rows = later.check()
    assert [r["label"] for r in rows if r["error_kind"] == "poison"] == [3]


def test_a_lone_worker_finds_poison_too(tmp_path):
    c = cluster(tmp_path, 10)
    harm = {row_id(3): "raise"}
    for _ in range(3):
        c.crash(c.start("w0", harm=harm))
    c.start("w0", harm=harm)
    c.run()
    assert [r["label"] for r in c.check() if r["error_kind"] == "poison"] == [3]


def test_a_row_that_one_engine_refuses_is_decoded_by_another(tmp_path):
    c = cluster(tmp_path, 10)
    first = c.start("w0", harm={row_id(2): "refuse", row_id(7): "refuse"})
    c.turns(10, first)
    c.start("w1")
    c.run()
    rows = c.check()
    assert all(row["error_kind"] is None for row in rows)
    assert rows[2]["worker"] == "w1"


def test_a_row_that_every_engine_refuses_fails(tmp_path):
    c = cluster(tmp_path, 10)
    for name in ("w0", "w1"):
        c.start(name, harm={row_id(2): "refuse"})
    c.run()
    rows = c.check()
    assert {r["label"]: r["error_kind"] for r in rows if r["error_kind"]} == {2: "out_of_memory"}


def test_a_row_without_progress_ends_its_worker_and_is_alone_to_blame(tmp_path):
    c = cluster(tmp_path, 5, limits={"no_progress_seconds": 5.0})
    first = c.start("w0", harm={row_id(3): "stall"})
    error = c.crash(first)
    assert row_id(3) in str(error)
    assert [s.row_id for s in c.coordinator._suspicions.of(0)] == [row_id(3)]
    c.start("w1")
    c.run()
    c.check()


# The breaker


def test_a_job_whose_rows_all_fail_stops_and_commits_none_of_them(tmp_path):
    rows = prompts(5) + [{"prompt": None, "label": i} for i in range(5, 200)]
    c = cluster(tmp_path, rows=rows)
    c.start("w0")
    c.run()
    failure = c.progress().failure
    assert failure is not None
    assert "null_prompt: column 'prompt' is null" in failure
    assert committed_units(c.job.output.path) <= {0}


def test_a_few_failing_rows_stop_nothing(tmp_path):
    rows = [{"prompt": None if i % 4 == 0 else f"question {i}", "label": i} for i in range(60)]
    c = cluster(tmp_path, rows=rows)
    c.start("w0")
    c.run()
    assert c.progress().failure is None
    assert sum(row["error_kind"] == "null_prompt" for row in c.check()) == 15


# Commits


def test_a_commit_that_fails_ends_the_worker_and_names_the_file(tmp_path):
    c = cluster(tmp_path, 5)
    retries = Retries(num_tries=3, sleep=c.clock.sleep)
    store = BrokenStore(c.job.output.path, retries=retries)
    store.folder = "data"
    first = c.start("w0", store=store)
    with pytest.raises(OSError, match="No space left"):
        c.turns(300, first)
    c.workers[first].abort()
    c.kill(first)
    assert c.coordinator._suspicions.of(0) == (), "no row is to blame"
    assert len(entries(c).outcomes) == 5
    c.start("w1")
    c.run()
    assert [row["worker"] for row in c.check()] == ["w0"] * 5


def test_holdings_tell_an_owner_what_never_arrived(tmp_path):
    c = cluster(tmp_path, 10, decoding=LONG)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: len(live_rows(c, first)) >= 4, first)
    c.turns(2, first)
    c.post.lose = lambda to, mail: isinstance(mail, Task)
    row = longest(c, first)
    c.move(row, second)
    c.until(lambda: c.post.of(Task), first)
    c.post.lose = lambda to, mail: False
    c.run()
    assert c.post.of(Holding)
    assert {r["row_id"]: r["worker"] for r in c.check()}[row.row_id] == "w0"


# A real engine


def test_a_real_engines_rows_are_moved_drained_and_resumed_with_the_same_text(tmp_path):
    target = save_tiny_checkpoint(tmp_path / "model")
    sections = {
        "model": {"target": str(target), "drafter": None, "dtype": "float32"},
        "decoding": {"max_new_tokens": 24, "temperature": 1.0, "method": "ar", "ignore_eos": True},
        "workers": {"max_batch": 4, "threads": 1},
    }
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    engines = PretrainedEngines()
    whole = LocalCluster(make_job(tmp_path / "whole", prompts(8), **sections), engines=engines)
    whole.start("w0")
    whole.run()
    broken = LocalCluster(make_job(tmp_path / "broken", prompts(8), **sections), engines=engines)
    first, second = broken.start("w0"), broken.start("w1")
    broken.turns(6)
    row = min(live_rows(broken, first), key=lambda row: row.num_tokens)
    broken.move(row, second)
    broken.turns(6)
    broken.coordinator.drain()
    broken.run()
    later = LocalCluster(broken.job, invocation=2, engines=engines)
    later.start("w0")
    later.run()
    assert [r["output"] for r in later.data()] == [r["output"] for r in whole.data()]
    assert sum(r["migrations"] for r in later.data()) >= 2
    steps = load_steps(later.job.output.path)
    assert sum(steps["num_committed"].to_pylist()) == 8 * 24
    assert set(steps["attempt"].to_pylist()) == {first, second, 131073}
