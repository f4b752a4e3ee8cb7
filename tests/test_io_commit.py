import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from fault_store import Crash, Fault, FaultStore, MemoryStore
from io_jobs import answer, planned, run_all, run_unit

from bastion_batch.errors import OutputError
from bastion_batch.io.commit import (
    Commit,
    claim_invocation,
    commit_unit,
    committed_units,
    data_name,
    read_footer,
    remove_orphan_steps,
    replace_unit,
    steps_name,
)
from bastion_batch.io.layout import ATTEMPTS_PER_INVOCATION
from bastion_batch.io.results import load_steps, prove_complete
from bastion_batch.io.retries import NO_RETRIES
from bastion_batch.io.store import TEMPORARY, LocalStore


def files(output):
    return sorted(str(p.relative_to(output)) for p in (output / "data").iterdir()) + sorted(
        str(p.relative_to(output)) for p in (output / "steps").iterdir()
    )


def answers(output):
    return pq.read_table(output / "data")["output"].to_pylist()


def require_clean(output, plan):
    """Every row once, the steps of exactly those rows, and nothing left over."""
    remove_orphan_steps(output, plan)
    require_sound(LocalStore(output), plan)
    named = [read_footer(output, data_name(u)).steps for u in range(plan.num_units)]
    assert sorted(files(output)) == sorted(
        [*(data_name(u) for u in range(plan.num_units)), *itertools.chain(*named)]
    )


def require_sound(store, plan):
    """Every row once, and the steps of exactly those rows."""
    prove_complete(store, plan)
    for unit in range(plan.num_units):
        footer = read_footer(store, data_name(unit))
        data = parquet(store, data_name(unit))
        steps = pa.concat_tables([parquet(store, name) for name in footer.steps])
        assert sum(steps["num_committed"].to_pylist()) == sum(data["num_output_tokens"].to_pylist())
        assert set(steps["worker"].to_pylist()) == set(data["worker"].to_pylist())
        assert set(steps["attempt"].to_pylist()) == {footer.attempt}


def parquet(store, name):
    with store.open(name) as file:
        return pq.read_table(file)


@pytest.fixture
def plan(tmp_path):
    return planned(tmp_path, num_rows=4)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def test_a_commit_leaves_the_data_and_its_steps(output, plan):
    assert committed_units(output) == set()
    assert run_unit(output, plan, 0, attempt=7) == Commit(won=True, attempt=7)
    assert files(output) == ["data/u00000000.parquet", "steps/u00000000-a7.parquet"]
    assert committed_units(output) == {0}
    assert not list((output / TEMPORARY).iterdir())
    footer = read_footer(output, data_name(0))
    assert (footer.job_id, footer.unit, footer.attempt) == (plan.job_id, 0, 7)
    assert footer.steps == (steps_name(0, 7),)
    assert pq.read_schema(output / data_name(0)).equals(plan.data_schema)


def test_a_unit_without_steps_names_none(output, plan):
    data, steps = answer(plan, 0)
    commit_unit(output, plan, 0, 1, data, None)
    assert read_footer(output, data_name(0)).steps == ()
    assert load_steps(output).equals(steps.slice(0, 0))


def test_a_crash_between_steps_and_data_commits_nothing(output, plan):
    def crash():
        assert files(output) == [steps_name(0, 1)]
        raise Crash

    with pytest.raises(Crash):
        run_unit(output, plan, 0, attempt=1, before_data=crash)
    assert committed_units(output) == set()
    assert load_steps(output).num_rows == 0
    assert run_unit(output, plan, 0, attempt=2).won
    assert set(load_steps(output)["attempt"].to_pylist()) == {2}
    assert remove_orphan_steps(output, plan) == 1
    require_clean(output, plan)


def test_the_later_attempt_loses_and_takes_its_steps_away(output, plan):
    def another_is_first():
        assert run_unit(output, plan, 0, attempt=2).won

    lost = run_unit(output, plan, 0, attempt=1, before_data=another_is_first)
    assert lost == Commit(won=False, attempt=2)
    assert run_unit(output, plan, 0, attempt=3) == Commit(won=False, attempt=2)
    assert files(output) == [data_name(0), steps_name(0, 2)]


def test_the_same_attempt_again_has_won_and_keeps_its_steps(output, plan):
    def same_attempt_was_first():
        assert run_unit(output, plan, 0, attempt=1).won

    again = run_unit(output, plan, 0, attempt=1, before_data=same_attempt_was_first)
    assert again == Commit(won=True, attempt=1)
    assert run_unit(output, plan, 0, attempt=1) == Commit(won=True, attempt=1)
    require_clean(output, plan)


def test_steps_of_an_earlier_try_give_way_to_those_of_the_answer(output, plan):
    with pytest.raises(Crash):
        run_unit(output, plan, 0, before_data=crash)
    data, steps = answer(plan, 0)
    commit_unit(output, plan, 0, 1, data, steps.slice(0, 4))
    assert load_steps(output).num_rows == 4


def broken_link(number, *, works):
    """A link that reports an error for a data file, having worked or not."""

    def link(source: Path, final: Path) -> None:
        if final.parent.name != "data" or works:
            os.link(source, final)
        if final.parent.name == "data":
            raise OSError(number, os.strerror(number))

    return link


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE])
def test_a_lost_answer_is_not_a_lost_race(output, plan, number):
    store = LocalStore(output, link=broken_link(number, works=True))
    assert run_unit(store, plan, 0, attempt=4) == Commit(won=True, attempt=4)
    require_clean(output, plan)


def test_a_failed_store_is_an_error_and_can_be_tried_again(output, plan):
    store = LocalStore(output, link=broken_link(errno.EIO, works=False), retries=NO_RETRIES)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        run_unit(store, plan, 0)
    assert committed_units(output) == set()
    assert not list((output / TEMPORARY).iterdir())
    assert run_unit(output, plan, 0).won
    require_clean(output, plan)


def test_a_full_disk_is_waited_for_and_then_named(tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"]).returncode:
        pytest.skip("nothing may be mounted here")
    script = [sys.executable, str(Path(__file__).with_name("full_disk.py")), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run([*namespace, *script], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_without_hard_links_the_first_name_still_stands(output, plan, number):
    def no_links(source, final):
        raise OSError(number, os.strerror(number))

    store = LocalStore(output, link=no_links)

    def another_is_first():
        assert run_unit(store, plan, 0, attempt=1).won

    lost = run_unit(store, plan, 0, attempt=2, before_data=another_is_first)
    assert lost == Commit(won=False, attempt=1)
    require_clean(output, plan)


class BreaksOnce:
    """Breaks one call, counted from the first."""

    def __init__(self, at, fault):
        self.left = at
        self.fault = fault

    def __call__(self, op, name):
        self.left -= 1
        return self.fault if self.left == -1 else None


@pytest.mark.parametrize("fault", set(Fault) - {Fault.STALE})
@pytest.mark.parametrize("rival", [False, True])
@pytest.mark.parametrize("conditional", [True, False])
def test_whatever_goes_wrong_at_any_call_each_row_is_there_once(
    tmp_path, fault, rival, conditional
):
    """Breaks each storage call of a commit in turn, with and without a rival, and goes on.

    A late request arrives last of all.
    """
    plan = replace(planned(tmp_path, num_rows=8), conditional_put=conditional)
    for at in itertools.count():
        memory = MemoryStore(conditional=conditional)
        decide = BreaksOnce(at, fault)
        store = FaultStore(memory, decide)
        tables = answer(plan, 0, attempt=1)

        def hook(memory=memory):
            if rival:
                run_unit(memory, plan, 0, attempt=2)

        with contextlib.suppress(Crash, OSError):
            commit_unit(store, plan, 0, 1, *tables, before_data=hook)
        for attempt in (1, 3):  # the worker tries again, then another one does
            commit = run_unit(memory, plan, 0, attempt=attempt)
            assert commit.attempt == read_footer(memory, data_name(0)).attempt
            assert commit.won == (commit.attempt == attempt)
        run_unit(memory, plan, 1, attempt=3)
        if conditional:
            remove_orphan_steps(memory, plan)
        store.land()
        require_sound(memory, plan)
        if decide.left >= 0:
            break
    assert at >= (5 if rival and conditional else 3)


def test_what_the_last_try_achieved_counts(tmp_path):
    plan = planned(tmp_path, num_rows=4)

    def decide(op, name):
        return Fault.ERROR_AFTER if op == "put_if_absent" else None

    store = FaultStore(MemoryStore(), decide, retries=NO_RETRIES)
    assert run_unit(store, plan, 0, attempt=4) == Commit(won=True, attempt=4)
    require_sound(store, plan)


@pytest.mark.parametrize("fault", set(Fault) - {Fault.STALE})
def test_whatever_goes_wrong_while_a_unit_is_replaced_it_is_whole(tmp_path, fault):
    plan = planned(tmp_path, num_rows=4)
    first, again, last = (answer(plan, 0, attempt) for attempt in (1, 2, 3))
    for at in itertools.count():
        memory = MemoryStore()
        commit_unit(memory, plan, 0, 1, *first)
        seen = memory.version(data_name(0))
        decide = BreaksOnce(at, fault)
        store = FaultStore(memory, decide)
        with contextlib.suppress(Crash, OSError):
            replace_unit(store, plan, 0, 2, *again, replaced=seen)
        require_sound(memory, plan)
        commit = replace_unit(memory, plan, 0, 3, *last, replaced=seen)
        assert commit.won == (commit.attempt == 3)
        remove_orphan_steps(memory, plan)
        store.land()
        require_sound(memory, plan)
        assert read_footer(memory, data_name(0)).attempt == commit.attempt in (2, 3)
        if decide.left >= 0:
            break
    assert at >= 3


def test_steps_of_an_invocation_at_work_stay(tmp_path):
    plan = planned(tmp_path, num_rows=4)
    memory = MemoryStore()
    for attempt in (1, ATTEMPTS_PER_INVOCATION + 1):
        memory.put(steps_name(0, attempt), b"about to be named")
    assert remove_orphan_steps(memory, plan) == 0, "the job is not complete"
    commit_unit(memory, plan, 0, 2, *answer(plan, 0, 2))
    assert remove_orphan_steps(memory, plan, live_invocations=[1]) == 1
    assert steps_name(0, ATTEMPTS_PER_INVOCATION + 1) in memory.contents
    assert remove_orphan_steps(memory, plan) == 1


@pytest.mark.parametrize("conditional", [True, False])
def test_of_attempts_that_break_again_and_again_one_stands_whole(tmp_path, conditional):
    """Seeded: attempts within attempts, each call of which may break; late requests land late."""
    plan = replace(planned(tmp_path, num_rows=4), conditional_put=conditional)
    tables = {attempt: answer(plan, 0, attempt) for attempt in range(1, 7)}
    for seed in range(60):
        rng = random.Random(seed)
        memory = MemoryStore(conditional=conditional)
        stores = []

        def decide(op, name, rng=rng):
            return rng.choice(list(Fault)) if rng.random() < 0.3 else None

        def attempts(numbers, rng=rng, memory=memory, stores=stores, decide=decide):
            """The first commits, and while it does so some of the others do."""
            if not numbers:
                return
            stores.append(FaultStore(memory, decide))
            inner = numbers[1:] if rng.random() < 0.5 else []
            with contextlib.suppress(Crash, OSError):
                commit_unit(
                    stores[-1],
                    plan,
                    0,
                    numbers[0],
                    *tables[numbers[0]],
                    before_data=lambda: attempts(inner),
                )
            rng.choice(stores).land()
            if committed_units(memory):
                require_sound(memory, plan)
            if not inner:
                attempts(numbers[1:])

        attempts(rng.sample(range(1, 6), 5))
        commit_unit(memory, plan, 0, 6, *tables[6])
        remove_orphan_steps(memory, plan)
        while any(store.num_under_way for store in stores):
            rng.choice(stores).land()
            require_sound(memory, plan)


class KilledAtLink:
    """A link during which the process is killed; crosses process borders by pickle."""

    def __init__(self, *, linked):
        self.linked = linked

    def __call__(self, source, final):
        if self.linked:
            os.link(source, final)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("linked", [False, True])
def test_a_killed_process_leaves_all_or_nothing(output, plan, linked):
    store = LocalStore(output, link=KilledAtLink(linked=linked))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_unit, args=(store, plan, 0, 1))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert committed_units(output) == ({0} if linked else set())
    assert list((output / TEMPORARY).iterdir()), "a killed process cleans nothing"
    commit = run_unit(output, plan, 0, attempt=2)
    assert commit == Commit(won=not linked, attempt=1 if linked else 2)
    require_clean(output, plan)


def test_a_foreign_file_under_a_units_name_is_named(output, plan):
    (output / data_name(0)).write_bytes(b"PAR1")
    with pytest.raises(OutputError, match=r"u00000000\.parquet is not a unit of this job"):
        run_unit(output, plan, 0)


# --- races --------------------------------------------------------------------------------------


def test_of_many_threads_one_commits_each_unit(tmp_path):
    plan = planned(tmp_path, num_rows=20)
    output, racers = tmp_path / "out", 8
    start = Barrier(racers)

    def race(attempt):
        tables = [answer(plan, unit, attempt) for unit in range(plan.num_units)]
        won = []
        for unit, (data, steps) in enumerate(tables):
            won.append(
                commit_unit(output, plan, unit, attempt, data, steps, before_data=start.wait)
            )
            start.wait()
        return won

    with ThreadPoolExecutor(racers) as pool:
        commits = list(pool.map(race, range(1, racers + 1)))
    for unit in range(plan.num_units):
        standing = {c[unit].attempt for c in commits}
        winners = [i for i, c in enumerate(commits, start=1) if c[unit].won]
        assert standing == set(winners)
        assert len(winners) == 1
    assert remove_orphan_steps(output, plan) == 0
    require_clean(output, plan)


def commit_all(output, plan, attempt):
    return [run_unit(output, plan, unit, attempt) for unit in range(plan.num_units)]


def test_of_two_processes_one_commits_each_unit(tmp_path):
    plan = planned(tmp_path, num_rows=60)
    output = tmp_path / "out"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        one, two = pool.map(commit_all, [output] * 2, [plan] * 2, [1, 2])
    for a, b in zip(one, two, strict=True):
        assert a.won != b.won
        assert a.attempt == b.attempt == (1 if a.won else 2)
    assert remove_orphan_steps(output, plan) == 0
    require_clean(output, plan)


def test_each_invocation_gets_a_number_of_its_own(output, plan):
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim_invocation(output), range(24)))
    assert sorted(numbers) == list(range(1, 25))


def test_an_invocation_whose_answer_was_lost_is_claimed_once(output, plan):
    assert (
        claim_invocation(LocalStore(output, link=lambda a, b: (os.link(a, b), os.link(a, b)))) == 1
    )
    assert claim_invocation(output) == 2


# --- readers ------------------------------------------------------------------------------------


def test_readers_see_committed_rows_only_at_every_moment(tmp_path):
    plan = planned(tmp_path, num_rows=12, output__unit_rows=2)
    output = tmp_path / "out"
    (output / TEMPORARY / "u00000099.parquet.torn").write_bytes(b"PAR1 torn")
    seen = []

    def look():
        seen.append(pyarrow.dataset.dataset(output / "data").to_table().num_rows)

    for unit in range(plan.num_units):
        run_unit(output, plan, unit, before_data=look)
    look()
    assert seen == [0, 2, 4, 6, 8, 10, 12]
    assert len(answers(output)) == 12


def test_datasets_reads_data_in_mid_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    plan = planned(tmp_path, num_rows=12)
    output = tmp_path / "out"
    run_unit(output, plan, 0)
    with pytest.raises(Crash):
        run_unit(output, plan, 1, before_data=crash)
    (output / TEMPORARY / "u00000001.parquet.torn").write_bytes(b"PAR1 torn")

    def loaded(name):
        return datasets.load_dataset(
            "parquet", data_dir=str(output / name), split="train", cache_dir=str(tmp_path / "hf")
        )

    assert loaded("data")["row_id"] == pq.read_table(output / "data")["row_id"].to_pylist()
    run_all(output, plan)
    finished = loaded("data")
    assert len(finished) == 12
    assert finished[0]["output"] == "answer f00000-000000000000 0"


def crash():
    raise Crash
