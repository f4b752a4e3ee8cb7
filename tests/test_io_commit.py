import errno
import itertools
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
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
    steps_name,
)
from bastion_batch.io.results import load_steps, prove_complete
from bastion_batch.io.store import TEMPORARY, LocalStore


class Crash(BaseException):
    """The process is gone: nothing of ours may catch this."""


class CrashingStore(LocalStore):
    """Goes wrong at one of its calls: before it, after it, or with an error for what it did."""

    def __init__(self, root, at, how):
        super().__init__(root)
        self._left = at
        self._how = how

    def _call(self, method, *args):
        self._left -= 1
        if self._left == -1 and self._how == "before":
            raise Crash
        if self._left == -1 and self._how == "failed":
            raise OSError(errno.EIO, "not done")
        result = method(*args)
        if self._left == -1 and hasattr(result, "close"):
            result.close()
        if self._left == -1 and self._how == "after":
            raise Crash
        if self._left == -1 and self._how == "lost":
            raise OSError(errno.EIO, "done, but the answer is lost")
        return result

    def put_if_absent(self, name, payload):
        return self._call(super().put_if_absent, name, payload)

    def exists(self, name):
        return self._call(super().exists, name)

    def open(self, name):
        return self._call(super().open, name)

    def remove(self, name):
        return self._call(super().remove, name)


def files(output):
    return sorted(str(p.relative_to(output)) for p in (output / "data").iterdir()) + sorted(
        str(p.relative_to(output)) for p in (output / "steps").iterdir()
    )


def answers(output):
    return pq.read_table(output / "data")["output"].to_pylist()


def require_clean(output, plan):
    """Every row once, the steps of exactly those rows, and nothing left over."""
    prove_complete(output, plan)
    remove_orphan_steps(output)
    named = [read_footer(output, data_name(u)).steps for u in range(plan.num_units)]
    assert sorted(files(output)) == sorted(
        [*(data_name(u) for u in range(plan.num_units)), *itertools.chain(*named)]
    )
    data = pq.read_table(output / "data")
    steps = load_steps(output)
    assert sum(steps["num_committed"].to_pylist()) == sum(data["num_output_tokens"].to_pylist())
    assert set(steps["worker"].to_pylist()) == set(data["worker"].to_pylist())


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
    assert remove_orphan_steps(output) == 1
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
    store = LocalStore(output, link=broken_link(errno.EIO, works=False))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        run_unit(store, plan, 0)
    assert committed_units(output) == set()
    assert not list((output / TEMPORARY).iterdir())
    assert run_unit(output, plan, 0).won
    require_clean(output, plan)


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


@pytest.mark.parametrize("how", ["before", "after", "failed", "lost"])
@pytest.mark.parametrize("rival", [False, True])
def test_whatever_goes_wrong_at_any_call_each_row_is_there_once(tmp_path, how, rival):
    """Breaks each storage call of a commit in turn, with and without a rival, and goes on."""
    plan = planned(tmp_path, num_rows=8)
    for at in itertools.count():
        output = tmp_path / f"out-{at}"
        store = CrashingStore(output, at, how)
        store.make_directories()
        tables = answer(plan, 0, attempt=1)

        def hook(output=output):
            if rival:
                run_unit(output, plan, 0, attempt=2)

        broke = True
        try:
            commit_unit(store, plan, 0, 1, *tables, before_data=hook)
            broke = store._left < 0
        except (Crash, OSError):
            pass
        for attempt in (1, 3):  # the worker tries again, then another one does
            commit = run_unit(output, plan, 0, attempt=attempt)
            assert commit.attempt == read_footer(output, data_name(0)).attempt
            assert commit.won == (commit.attempt == attempt)
        run_unit(output, plan, 1, attempt=3)
        require_clean(output, plan)
        if not broke:
            break
    assert at >= (5 if rival else 3)


class KilledAtLink:
    """A link during which the process is killed; crosses process borders by pickle."""

    def __init__(self, directory, *, linked):
        self.directory = directory
        self.linked = linked

    def __call__(self, source, final):
        if self.linked or final.parent.name != self.directory:
            os.link(source, final)
        if final.parent.name == self.directory:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("directory", ["steps", "data"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_killed_process_leaves_all_or_nothing(output, plan, directory, linked):
    store = LocalStore(output, link=KilledAtLink(directory, linked=linked))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_unit, args=(store, plan, 0, 1))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    done = directory == "data" and linked
    assert committed_units(output) == ({0} if done else set())
    assert list((output / TEMPORARY).iterdir()), "a killed process cleans nothing"
    assert run_unit(output, plan, 0, attempt=2) == Commit(won=not done, attempt=1 if done else 2)
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
    assert remove_orphan_steps(output) == 0
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
    assert remove_orphan_steps(output) == 0
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
