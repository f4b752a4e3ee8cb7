"""The commit on S3, as far as moto's server is S3: conditions, lost answers, stale listings."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from io_jobs import Target, answer, make_job, read, run_all, run_unit, write_jsonl
from object_servers import Breakage, Unreliable, serving

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
from bastion_batch.io.object_store import ObjectStore
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import load_steps, prove_complete, read_totals
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import STEPS, TEMPORARY, open_store, probe_conditional

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

NAME = "data/u00000000.parquet"


@pytest.fixture(scope="module")
def moto():
    application = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
    server = Unreliable(application)
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(moto):
    moto[0].sent.clear()
    moto[0].breakages.clear()
    moto[0].stale = moto[0].ignores_conditions = False
    return moto[0]


@pytest.fixture
def options(server, moto):
    return {"key": "test", "secret": "test", "endpoint_url": moto[1]}


@pytest.fixture
def slept():
    return []


@pytest.fixture
def store(options, slept, tmp_path):
    """An output of this test's own, in a bucket that is there."""
    store = ObjectStore(
        f"s3://bucket/{tmp_path.name}", options, retries=Retries(sleep=slept.append)
    )
    if not store._fs.exists("bucket"):
        store._fs.mkdir("bucket")
    return store


@pytest.fixture
def plan(tmp_path, store, options):
    """A planned job of two units."""
    file = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"say {i}"} for i in range(8)])
    job = make_job(file, store._url, output__storage_options=options, output__unit_rows=4)
    return open_plan(job, Target())


def test_a_store_keeps_its_promises(store, server):
    store.make_directories()
    assert store.names(TEMPORARY) == []
    assert store.put_if_absent(NAME, memoryview(b"one"))
    assert not store.put_if_absent(NAME, b"two")
    [first, second] = server.matching("PUT", NAME)
    assert first.headers["If-None-Match"] == second.headers["If-None-Match"] == "*"
    assert store.read(NAME) == b"one"
    seen = store.version(NAME)
    assert store.replace_if(NAME, b"three", seen)
    assert server.matching("PUT", NAME)[-1].headers["If-Match"] == seen
    assert not store.replace_if(NAME, b"four", seen)
    assert not store.replace_if("data/absent", b"five", seen)
    assert store.read(NAME) == b"three"
    store.remove(NAME)
    store.remove(NAME)
    assert not store.exists(NAME)
    assert store.version(NAME) is None
    assert probe_conditional(store)


def test_reading_asks_for_the_ranges_that_are_needed(store, server):
    payload = bytes(range(256)) * 8192
    store.put(NAME, payload)
    server.sent.clear()
    with store.open(NAME) as file:
        file.seek(-8, 2)
        assert file.read() == payload[-8:]
    assert [sent.headers["Range"] for sent in server.matching("GET", NAME)] == [
        f"bytes={len(payload) - 8}-{len(payload) - 1}"
    ]


@pytest.mark.slow
def test_a_large_object_is_created_in_parts_under_the_same_condition(store, server):
    payload = bytes(100 * 2**20)
    server.breakages.append(Breakage("POST", "uploadId", 503, done=True))
    assert not store.put_if_absent(NAME, payload), "our own object, whose answer was lost"
    assert store._size(NAME) == len(payload)
    assert not store.put_if_absent(NAME, payload)
    completed = [s for s in server.matching("POST", NAME) if "uploadId" in s.query]
    assert {s.headers["If-None-Match"] for s in completed} == {"*"}


def test_a_job_is_planned_committed_and_proved(store, plan):
    assert plan.conditional_put
    assert [claim_invocation(store), claim_invocation(store)] == [1, 2]
    run_all(store, plan)
    assert committed_units(store) == {0, 1}
    prove_complete(store, plan)
    assert read_totals(store, plan).num_outputs == 8
    assert load_steps(store).num_rows == 24
    assert not [n for n in store.names(TEMPORARY) if n.startswith(f"{TEMPORARY}/u")]


@pytest.mark.parametrize("status", [503, 409])
def test_a_lost_answer_is_not_a_lost_race(store, plan, server, slept, status):
    server.breakages.append(Breakage("PUT", data_name(0), status, done=True))
    assert run_unit(store, plan, 0, attempt=7) == Commit(won=True, attempt=7)
    assert len(slept) == 1
    assert store.names(STEPS) == [steps_name(0, 7)]
    assert not server.breakages


def test_a_rival_wins_while_our_request_is_refused(store, plan, server):
    def rival():
        assert run_unit(store, plan, 0, attempt=8).won
        server.breakages.append(Breakage("PUT", data_name(0), 503, done=False))

    lost = run_unit(store, plan, 0, attempt=7, before_data=rival)
    assert lost == Commit(won=False, attempt=8)
    assert store.names(STEPS) == [steps_name(0, 8)]


def test_every_kind_of_request_is_tried_again(store, plan, server, slept):
    run_unit(store, plan, 0)
    for method, part in [
        ("GET", "list-type=2"),
        ("HEAD", NAME),
        ("GET", NAME),
        ("PUT", "run.json"),
    ]:
        server.breakages.append(Breakage(method, part, 503, done=False))
    assert committed_units(store) == {0}
    assert read_footer(store, NAME).attempt == 1
    store.put("run.json", b"{}")
    server.breakages.append(Breakage("DELETE", "run.json", 503, done=True))
    store.remove("run.json")
    assert len(slept) == 5


def test_a_store_that_stays_away_is_an_error_that_names_the_unit(store, plan, server, slept):
    server.breakages += [Breakage("PUT", data_name(0), 503, done=False)] * 1000
    with pytest.raises(OSError, match=rf"unit 0 cannot be committed: .*{data_name(0)}"):
        run_unit(store, plan, 0)
    assert len(slept) >= 6
    assert committed_units(store) == set()
    server.breakages.clear()
    assert run_unit(store, plan, 0, attempt=2).won


def test_a_job_resumes_over_stale_listings(store, plan, server):
    assert committed_units(store) == set()
    assert store.names(STEPS) == []
    run_unit(store, plan, 0, attempt=1)
    server.stale = True
    assert committed_units(store) == set(), "the listing is one of before"
    for unit in range(plan.num_units):
        assert run_unit(store, plan, unit, attempt=2) == Commit(unit == 1, 1 if unit == 0 else 2)
    prove_complete(store, plan)
    assert read_totals(store, plan, complete=True).num_outputs == 8
    server.stale = False
    assert remove_orphan_steps(store, plan) == 0
    assert store.names(STEPS) == [steps_name(0, 1), steps_name(1, 2)]
    prove_complete(store, plan)


def test_of_two_writers_one_commits_each_unit(store, plan, options):
    stores = [store, pickle.loads(pickle.dumps(store))]
    start = Barrier(2)

    def commit(attempt):
        tables = answer(plan, 0, attempt)
        return commit_unit(stores[attempt], plan, 0, attempt, *tables, before_data=start.wait)

    with ThreadPoolExecutor(2) as pool:
        commits = list(pool.map(commit, range(2)))
    winner = read_footer(store, NAME).attempt
    assert commits == [Commit(attempt == winner, winner) for attempt in range(2)]
    assert store.names(STEPS) == [steps_name(0, winner)]


def test_a_server_that_ignores_conditions_is_found_out(store, server, tmp_path, options, caplog):
    server.ignores_conditions = True
    assert not probe_conditional(store)
    file = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "say"}])
    plan = open_plan(make_job(file, store._url, output__storage_options=options), Target())
    assert not plan.conditional_put
    assert f"output {store.root} cannot create a file only if it is absent" in caplog.text

    def rival():
        assert run_unit(store, plan, 0, attempt=2).won

    assert run_unit(store, plan, 0, attempt=1, before_data=rival).won, "the last one stands"
    assert read_footer(store, NAME).attempt == 1
    assert run_unit(store, plan, 0, attempt=3) == Commit(won=False, attempt=1)
    assert remove_orphan_steps(store, plan) == 0
    prove_complete(store, plan)
    assert load_steps(store)["attempt"].to_pylist() == [1, 1, 1]


def test_a_server_that_refuses_conditions_is_overwritten(store, server):
    server.breakages.append(Breakage("PUT", NAME, 501, done=False))
    assert store.put_if_absent(NAME, b"one")
    assert not store.conditional
    assert not store.put_if_absent(NAME, b"two")
    assert ["If-None-Match" in sent.headers for sent in server.matching("PUT", NAME)] == [
        True,
        False,
    ]


# --- replacing ----------------------------------------------------------------------------------


def replaced(store, plan, attempt, seen, **hooks):
    data, steps = answer(plan, 0, attempt)
    return replace_unit(store, plan, 0, attempt, data, steps, replaced=seen, **hooks)


def test_a_unit_is_replaced_whole(store, plan):
    run_all(store, plan)
    seen = store.version(NAME)
    assert replaced(store, plan, 9, seen) == Commit(won=True, attempt=9)
    assert read_footer(store, NAME).steps == (steps_name(0, 9),)
    assert remove_orphan_steps(store, plan) == 1
    prove_complete(store, plan)
    assert load_steps(store).num_rows == 24


def test_a_replacement_whose_answer_was_lost_has_won(store, plan, server):
    run_all(store, plan)
    seen = store.version(NAME)
    server.breakages.append(Breakage("PUT", NAME, 503, done=True))
    assert replaced(store, plan, 9, seen) == Commit(won=True, attempt=9)
    assert steps_name(0, 9) in store.names(STEPS)


def test_of_two_replacements_one_counts(store, plan):
    run_all(store, plan)
    seen = store.version(NAME)
    assert replaced(store, plan, 9, seen).won
    assert replaced(store, plan, 10, seen) == Commit(won=False, attempt=9)
    assert steps_name(0, 10) not in store.names(STEPS)


# --- what is refused ----------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_named(options):
    with pytest.raises(OutputError, match=r"output s3://nosuch/out cannot be written: .*bucket"):
        open_plan_at("s3://nosuch/out", options)


def open_plan_at(url, options):
    ObjectStore(url, options, retries=Retries(num_tries=1)).make_directories()


def test_a_server_that_does_not_answer_is_an_os_error(slept):
    options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9"}
    store = ObjectStore(
        "s3://bucket/out", options, retries=Retries(num_tries=2, sleep=slept.append)
    )
    with pytest.raises(OSError, match="connect"):
        store.read(NAME)
    assert len(slept) == 1


def test_options_open_the_store_of_a_job(plan, store, options):
    job = make_job("in", store._url, output__storage_options=options)
    assert open_store(job.output).exists("_bastion/plan.json")
    assert read(plan, 0).row_ids
