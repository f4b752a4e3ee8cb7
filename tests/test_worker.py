"""A worker in this process, on real files, with the scripted engine and a real coordinator."""

import logging
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
from balances import MovingBalance
from local_cluster import TURN_SECONDS, LocalCluster, make_job, prompts

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.invocation import coordinator_units
from bastion_batch.cluster.links import LocalLink
from bastion_batch.cluster.mail import Task
from bastion_batch.cluster.messages import Directions, Ownership
from bastion_batch.cluster.node import NodeShare, usable_cores
from bastion_batch.cluster.scripted import ScriptedEngine, ScriptedEngines, scripted_ids
from bastion_batch.cluster.worker import Worker, WorkerSpec
from bastion_batch.core.noise import row_key
from bastion_batch.core.orders import Share
from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.commit import committed_units
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import load_steps, prove_complete
from bastion_batch.records import Request, SamplingParams

ENGINES = ScriptedEngines(max_batch=4)


@pytest.fixture(autouse=True)
def _package_log_as_before():
    package = logging.getLogger("bastion_batch")
    handlers, level = list(package.handlers), package.level
    yield
    for handler in set(package.handlers) - set(handlers):
        package.removeHandler(handler)
        handler.close()
    package.setLevel(level)


class Bench:
    """A planned job and its coordinator, and workers for it."""

    def __init__(self, job):
        self.job = job
        self.plan = open_plan(job, ENGINES.check(job))
        self.coordinator = Coordinator(
            **coordinator_units(self.plan)._asdict(), done=committed_units(job.output.path)
        )

    def worker(self, attempt=65537, engines=ENGINES, **changes):
        spec = {
            "worker": "w0",
            "attempt": attempt,
            "job": self.job,
            "job_id": self.plan.job_id,
            "inputs": self.plan.inputs,
            "steps": self.plan.steps,
            "device": "cpu",
            "workers_on_node": 1,
        } | changes
        return Worker(WorkerSpec(**spec), LocalLink(self.coordinator, attempt), engines)

    def data(self):
        return pq.read_table(f"{self.job.output.path}/data")


def test_every_row_is_answered_once_with_its_own_text(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(23), decoding={"samples_per_row": 2}))
    bench.worker().run()
    prove_complete(bench.job.output.path, bench.plan)
    rows = bench.data().to_pylist()
    assert [(r["label"], r["sample_index"]) for r in rows] == [
        (i, s) for i in range(23) for s in range(2)
    ]
    for row in rows:
        request = Request(
            row_id=row["row_id"],
            prompt_ids=tuple(row["prompt"].encode()),
            sampling=SamplingParams(max_new_tokens=40),
            noise_key=row_key(0, row["row_id"], row["sample_index"]),
        )
        assert row["output"] == bytes(scripted_ids(request)).decode()
        assert row["worker"] == "w0"
    assert bench.coordinator.progress(0.0).finished


def test_steps_add_up_to_the_tokens_of_each_row(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(12)))
    bench.worker().run()
    steps = load_steps(bench.job.output.path)
    summed = steps.group_by("row_id").aggregate([("num_committed", "sum")])
    sums = {row["row_id"]: row["num_committed_sum"] for row in summed.to_pylist()}
    assert {r["row_id"]: r["num_output_tokens"] for r in bench.data().to_pylist()} == sums
    assert set(steps["attempt"].to_pylist()) == {65537}


def test_rows_at_fault_are_error_rows_and_the_others_are_answered(tmp_path):
    rows = prompts(9)
    rows[2] = {"prompt": None, "label": 2}
    rows[5] = {"prompt": "x" * 5000, "label": 5}
    rows[7] = {"prompt": "", "label": 7}
    bench = Bench(make_job(tmp_path, rows, decoding={"samples_per_row": 2}))
    bench.worker().run()
    kinds = {r["label"]: r["error_kind"] for r in bench.data().to_pylist()}
    assert {k: v for k, v in kinds.items() if v} == {
        2: "null_prompt",
        5: "prompt_too_long",
        7: "empty_prompt",
    }
    assert bench.coordinator.progress(0.0).num_failed == 6


def test_a_unit_of_faulty_rows_alone_is_committed(tmp_path):
    bench = Bench(make_job(tmp_path, [{"prompt": None}] * 6 + prompts(1)))
    bench.worker().run()
    assert bench.data()["finish_reason"].to_pylist()[:6] == ["error"] * 6


class WatchedEngine(ScriptedEngine):
    """Notes the most rows it was ever given, and can fail at a step."""

    most_rows = 0

    def __init__(self, fail_at=None, **options):
        super().__init__(**options)
        self._fail_at = fail_at

    def add(self, request):
        super().add(request)
        self.most_rows = max(self.most_rows, self.num_waiting + self.num_running)

    def step(self):
        if self.totals.num_steps == self._fail_at:
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().step()


class TheseEngines(ScriptedEngines):
    """Hands out one engine that the test holds."""

    def __init__(self, engine):
        super().__init__()
        object.__setattr__(self, "engine", engine)

    def build(self, job, device, share):
        return self.engine


def test_the_engine_holds_at_most_twice_its_batch(tmp_path):
    engine = WatchedEngine(max_batch=4)
    bench = Bench(make_job(tmp_path, prompts(60)))
    bench.worker(engines=TheseEngines(engine)).run()
    assert 4 < engine.most_rows <= 8


def test_an_engine_fault_ends_the_worker_and_another_finishes_its_units(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(23)))
    engines = TheseEngines(WatchedEngine(max_batch=4, fail_at=20))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.worker(engines=engines).run()
    done = committed_units(bench.job.output.path)
    assert 0 < len(done) < bench.plan.num_units
    bench.coordinator.worker_lost(65537, done, 0.0)
    bench.worker(65538).run()
    prove_complete(bench.job.output.path, bench.plan)
    log = (tmp_path / "out/_bastion/logs/w0-65537.log").read_text()
    assert "worker w0 ends" in log
    assert "illegal memory access" in log


class Crash(BaseException):
    """Stands for the process's end."""


def test_a_crash_between_steps_and_data_leaves_orphans_that_do_not_count(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(10)))

    def crash():
        raise Crash

    with pytest.raises(Crash):
        bench.worker(before_data=crash).run()
    assert committed_units(bench.job.output.path) == set()
    assert len(list((tmp_path / "out/steps").iterdir())) == 1
    bench.coordinator.worker_lost(65537, (), 0.0)
    bench.worker(65538).run()
    assert set(load_steps(bench.job.output.path)["attempt"].to_pylist()) == {65538}


def test_a_given_up_worker_that_lives_on_changes_nothing(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(10)))

    def overtaken():
        if not committed_units(bench.job.output.path):
            bench.coordinator.worker_lost(65537, (), 0.0)
            bench.worker(65538).run()

    bench.worker(before_data=overtaken).run()
    prove_complete(bench.job.output.path, bench.plan)
    assert set(load_steps(bench.job.output.path)["attempt"].to_pylist()) == {65538}
    assert bench.coordinator.num_dropped >= 1


def test_a_worker_that_does_not_see_the_output_says_so(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(3)))
    with pytest.raises(OutputError, match="does not see the job's plan"):
        bench.worker(job_id="another").run()


def test_a_changed_input_stops_the_worker(tmp_path):
    bench = Bench(make_job(tmp_path, prompts(3)))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "other"}\n')
    with pytest.raises(DataError, match="has changed"):
        bench.worker().run()


def test_no_prompt_text_in_the_log(tmp_path):
    rows = [{"prompt": "SECRET-" + "x" * 5000}, {"prompt": "SECRET words"}]
    Bench(make_job(tmp_path, rows)).worker().run()
    assert "SECRET" not in (tmp_path / "out/_bastion/logs/w0-65537.log").read_text()


def test_threads_are_the_workers_share_of_the_cores():
    assert NodeShare.of(3, 8, "cpu").num_threads == 3
    assert NodeShare.of("auto", 1, "cpu").num_threads >= 1
    assert NodeShare.of("auto", 10_000, "cpu").num_threads == 1
    whole = NodeShare.of("auto", 1, "cpu").memory_share
    assert NodeShare.of("auto", 4, "cpu").memory_share == whole / 4
    assert NodeShare.of("auto", 4, "cuda").memory_share == whole


def test_a_containers_cpu_limit_counts(tmp_path):
    limit = tmp_path / "cpu.max"
    limit.write_text("50000 100000\n")
    assert usable_cores(limit) == 1
    limit.write_text("max 100000\n")
    assert usable_cores(limit) == usable_cores(tmp_path / "absent") >= 1


def test_a_busy_worker_never_idles_between_rows(tmp_path):
    """Every turn makes a step as long as a row of the job waits."""
    c = LocalCluster(
        make_job(tmp_path, prompts(400), output={"unit_rows": 8}),
        max_batch=8,
        balance=MovingBalance,
    )
    engine = ScriptedEngine(max_batch=8, step_seconds=TURN_SECONDS, sleep=lambda _: None)
    attempt = c.start("w0", engines=TheseEngines(engine))
    num_turns = num_idle = 0
    while c.progress().num_done < 360:
        num_steps = engine.totals.num_steps
        c.turn()
        num_turns += 1
        num_idle += engine.totals.num_steps == num_steps
    assert num_turns > 300
    assert num_idle <= 0.01 * num_turns
    assert c.workers[attempt]._reporter.num_finished > 300
    c.run()
    c.check()


class CountingLink(LocalLink):
    """Keeps what was reported."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reports = []

    def report(self, report):
        self.reports.append(report)
        super().report(report)


def counted(c, worker):
    """Have a worker's calls kept; its link."""
    link = CountingLink(c.coordinator, worker._spec.attempt, c.clock, c.post)
    worker._link = worker._reporter._link = link
    return link


def test_a_worker_calls_about_once_a_second_whatever_enters_and_leaves(tmp_path):
    """Rows of a few steps enter at almost every turn."""
    job = make_job(
        tmp_path, prompts(900), output={"unit_rows": 20}, decoding={"max_new_tokens": 12}
    )
    c = LocalCluster(job, max_batch=4)
    link = counted(c, c.workers[c.start("w0")])
    began = c.clock.now
    c.run()
    seconds = c.clock.now - began
    assert seconds > 60
    assert len(link.reports) <= seconds + 60, "ten a second for the first five"
    c.check()


def test_rows_that_were_in_an_engine_when_it_ended_are_named_before_the_next_step(tmp_path):
    job = make_job(
        tmp_path, prompts(60), output={"unit_rows": 20}, decoding={"max_new_tokens": 200}
    )
    c = LocalCluster(job, max_batch=4)
    first, second = c.start("w0"), c.start("w1")
    c.turns(30, first)
    link = counted(c, c.workers[second])
    c.turns(120, second)
    suspects = {(r.row_id, r.sample_index) for r in c.coordinator._attempts[first].report.rows}
    c.kill(first)
    met = set()
    while c.workers:
        c.turn()
        if second in c.workers:
            live = suspects & {row[1].key for row in c.workers[second]._live.rows()}
            met |= live
            assert live <= {(r.row_id, r.sample_index) for r in link.reports[-1].rows}
    assert met == suspects


def test_an_owner_that_waits_for_others_does_not_call_more_often(tmp_path):
    c = LocalCluster(make_job(tmp_path, prompts(5), decoding={"max_new_tokens": 200}))
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: c.workers[first]._exchange.open)
    c.balance.say(first, max_running=0, shares=[Share(second, 5)])
    link = counted(c, c.workers[first])
    c.turns(20, first)
    for row in link.reports[-1].rows:
        c.move(row, second)
    c.until(lambda: not c.workers[first]._engine.has_work, first)
    began, num_before = c.clock.now, len(link.reports)
    c.turns(200, first)
    assert c.workers[first]._exchange.open
    assert len(link.reports) - num_before <= c.clock.now - began + 3
    c.balance.say(first, max_running=None)
    c.run()


def test_lengths_are_said_when_they_have_changed(tmp_path):
    job = make_job(tmp_path, prompts(100), decoding={"max_new_tokens": 40})
    c = LocalCluster(job, max_batch=2)
    link = counted(c, c.workers[c.start("w0")])
    c.turns(600)
    said = [report.lengths for report in link.reports if report.lengths]
    assert 3 < len(said) < len(link.reports) / 3
    assert all(one != other for one, other in pairwise(said))
    c.run()


def test_shares_are_served_a_few_rows_between_two_steps(tmp_path):
    job = make_job(
        tmp_path, prompts(200), output={"unit_rows": 200}, decoding={"max_new_tokens": 200}
    )
    c = LocalCluster(job, max_batch=4)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: c.workers[first]._exchange.open, first)
    c.balance.say(first, shares=[Share(second, 50), Share(second, 30)])
    num_sent = []
    for _ in range(60):
        before = len(c.post.of(Task))
        c.turn(first)
        num_sent.append(len(c.post.of(Task)) - before)
    assert sum(num_sent) == 80
    assert [num for num in num_sent if num] == [32, 32, 16], "in turns one after the other"
    c.run()


def test_a_report_says_what_rows_have_now(tmp_path):
    c = LocalCluster(make_job(tmp_path, prompts(3), decoding={"max_new_tokens": 200}))
    attempt = c.start("w0")
    c.turns(8)
    rows = c.workers[attempt]._reporter._report().rows
    tokens = c.workers[attempt]._engine.num_tokens()
    assert rows
    assert {(r.row_id, r.sample_index): r.num_tokens for r in rows} == tokens
    assert all(r.num_tokens > 4 for r in rows)
    assert {r.num_prompt_tokens for r in rows} == {len("question 0")}
    assert {(r.facts.prompt_size, r.facts.max_new_tokens) for r in rows} == {(10.0, 200)}
    assert len({r.facts.group for r in rows}) == 1
    c.run()


def test_a_unit_that_comes_back_to_its_owner_is_not_given_to_itself(tmp_path):
    c = LocalCluster(make_job(tmp_path, prompts(5), decoding={"max_new_tokens": 200}))
    first = c.start("w0")
    c.turns(8)
    [unit] = c.workers[first]._exchange.open
    c.workers[first].deliver(Directions(owners=(Ownership(unit, 2, first),)))
    c.turn()
    assert unit in c.workers[first]._exchange.open, "until the lease comes"
    assert all(to != first for to, _ in c.post.sent)
    c.run()
    c.check()


def test_nothing_is_kept_of_guests_that_are_safe_at_their_owner(tmp_path):
    job = make_job(
        tmp_path, prompts(60), output={"unit_rows": 60}, decoding={"max_new_tokens": 100}
    )
    c = LocalCluster(job, max_batch=2)
    first, second = c.start("w0"), c.start("w1")
    c.until(lambda: c.workers[first]._exchange.open, first)
    c.balance.say(first, shares=[Share(second, 2)])
    guests = c.workers[second]._exchange.guests
    c.until(lambda: len([*guests.items()]) == 1)
    [(_, guest)] = guests.items()
    c.until(lambda: not [*guests.items()])
    assert (guest.waiting, guest.facts, guest.kept) == ({}, {}, {})
    assert c.workers[first]._exchange.open, "the unit is still open"
    c.run()
    c.check()
