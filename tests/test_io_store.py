"""What every store promises, and what each kind does about its own errors."""

import errno
import logging
import os
import pickle
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from uuid import uuid4

import pytest
from fault_store import Fault, FaultStore, MemoryStore
from io_jobs import make_job

from bastion_batch.config import OutputConfig
from bastion_batch.errors import InputError, JobFileError, OutputError
from bastion_batch.io.object_store import ObjectStore
from bastion_batch.io.retries import NO_RETRIES, Retries, may_pass
from bastion_batch.io.store import (
    DATA,
    PRIVATE,
    STEPS,
    TEMPORARY,
    LocalStore,
    Store,
    open_store,
    prepare_output,
    probe_conditional,
)

NAME = f"{DATA}/u00000000.parquet"


def failing(number, *, times=10**9, works=False):
    """A link that fails so many times, having worked or not."""
    left = [times]

    def link(source: Path, final: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.link(source, final)
            return
        if works:
            os.link(source, final)
        raise OSError(number, os.strerror(number))

    return link


@pytest.fixture(params=["local", "no hard links", "fsspec", "memory", "memory, last one wins"])
def store(request, tmp_path) -> Store:
    made: dict[str, Store] = {
        "local": LocalStore(tmp_path / "out"),
        "no hard links": LocalStore(tmp_path / "out", link=failing(errno.EPERM)),
        "fsspec": open_store(f"memory://{uuid4().hex}/out"),
        "memory": MemoryStore(),
        "memory, last one wins": FaultStore(MemoryStore(conditional=False), lambda op, name: None),
    }
    made[request.param].make_directories()
    return made[request.param]


# --- every store --------------------------------------------------------------------------------


def test_a_name_is_created_once(store):
    assert isinstance(store, Store)
    assert not store.exists(NAME)
    assert store.put_if_absent(NAME, memoryview(b"one"))
    assert store.exists(NAME)
    created_twice = store.put_if_absent(NAME, b"two")
    assert store.read(NAME) == (b"two" if created_twice else b"one")
    assert not (created_twice and store.conditional)


def test_names_are_those_of_one_folder_in_order(store):
    for name in (f"{DATA}/b", f"{DATA}/a", f"{STEPS}/c", f"{DATA}/inner/d"):
        if "inner" not in name or not isinstance(store, LocalStore):
            store.put(name, b"")
    assert store.names(DATA) == [f"{DATA}/a", f"{DATA}/b"]
    assert store.names("nowhere") == []


def test_what_is_read_is_what_was_put(store):
    payload = bytes(range(256)) * 3000
    store.put(NAME, payload)
    assert store.read(NAME) == payload
    with store.open(NAME) as file:
        assert file.read(10) == payload[:10]
        file.seek(-7, os.SEEK_END)
        assert file.read() == payload[-7:]
        file.seek(300_000)
        assert file.read(300_000) == payload[300_000:600_000]
        assert file.tell() == 600_000
    store.put(NAME, b"new")
    assert store.read(NAME) == b"new"


def test_an_absent_name_is_not_found_and_may_be_removed(store):
    store.remove(NAME)
    assert store.version(NAME) is None
    assert not store.replace_if(NAME, b"x", "some version")
    assert not store.exists(NAME)
    for look in (store.read, store.open):
        with pytest.raises(FileNotFoundError, match="u00000000"):
            look(NAME)


def test_only_the_version_that_was_seen_is_replaced(store):
    store.put(NAME, b"one")
    seen = store.version(NAME)
    assert store.version(NAME) == seen
    assert store.replace_if(NAME, b"two", seen)
    assert store.version(NAME) != seen
    assert not store.replace_if(NAME, b"three", seen)
    assert store.read(NAME) == b"two"


def test_a_probe_tells_whether_creating_is_atomic_and_leaves_nothing(store):
    expected = isinstance(store, MemoryStore) or (
        isinstance(store, LocalStore) and store._link is os.link
    )
    assert probe_conditional(store) is expected
    assert store.names(TEMPORARY) == []


def test_an_output_of_another_is_refused(store):
    store.put(NAME, b"not ours")
    with pytest.raises(OutputError, match=r"has files in data/ but no plan"):
        prepare_output(store)


# --- local files --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.EPERM])
def test_the_inode_tells_a_lost_answer_from_a_lost_race(tmp_path, number):
    store = LocalStore(tmp_path, link=failing(number, works=True))
    store.make_directories()
    assert store.put_if_absent(NAME, b"ours")
    assert store.conditional
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_bytes(b"theirs")
    assert not LocalStore(tmp_path, link=failing(errno.EEXIST)).put_if_absent(NAME, b"ours")
    assert store.names(TEMPORARY) == []


def test_one_of_many_replacers_wins(tmp_path):
    store = LocalStore(tmp_path)
    store.make_directories()
    store.put(NAME, b"old")
    seen, start = store.version(NAME), Barrier(8)

    def replace(number: int) -> bool:
        start.wait()
        return LocalStore(tmp_path).replace_if(NAME, str(number).encode(), seen)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(replace, range(8)))
    assert sum(won) == 1
    assert store.read(NAME) == str(won.index(True)).encode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match=f"output {tmp_path}/out cannot be written: Permission"):
        LocalStore(tmp_path / "out").make_directories()


def test_a_file_where_the_output_should_be_is_named(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match=r"out cannot be written: Not a directory"):
        LocalStore(tmp_path / "out").make_directories()


def test_a_full_disk_leaves_no_torn_file(tmp_path):
    store = LocalStore(tmp_path)
    store.make_directories()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.put_if_absent(NAME, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not store.exists(NAME)
    assert store.names(TEMPORARY) == []


# --- URLs ---------------------------------------------------------------------------------------


def test_a_store_is_opened_from_a_path_a_url_or_a_job(tmp_path):
    job = make_job("in.jsonl", "memory://here", output__storage_options={"a": 1})
    assert isinstance(open_store(job.output), ObjectStore)
    assert isinstance(open_store(tmp_path), LocalStore)
    assert open_store(f"file://{tmp_path}/out").root == f"{tmp_path}/out"
    store = MemoryStore()
    assert open_store(store) is store


def test_an_unknown_protocol_is_refused():
    with pytest.raises(OutputError, match=r"nosuch://bucket/out cannot be opened: Protocol"):
        open_store("nosuch://bucket/out").exists(NAME)


def test_a_missing_package_is_named_with_its_command():
    from bastion_batch.io import filesystems

    error = filesystems.missing_package("s3://user:secret@bucket/out", ImportError("no s3fs"))
    assert isinstance(error, InputError)
    assert str(error) == "s3://bucket/out needs a package: pip install 'bastion_batch[s3]'"
    other = filesystems.missing_package("sftp://h/out", ImportError("Install paramiko"))
    assert "Install paramiko" in str(other)


def test_credentials_are_shown_nowhere(caplog):
    url = "memory://user:secret@host/out"
    config = OutputConfig(path=url, storage_options={"key": "secret"})
    store = open_store(config)
    assert store.root == "memory://host/out"
    assert "secret" not in repr(make_job("in", "out", output__storage_options={"key": "secret"}))
    with pytest.raises(JobFileError) as refused:
        make_job("in", "out", output__storage_options="secret")
    assert "secret" not in str(refused.value)


def test_an_object_store_crosses_processes_with_what_it_needs():
    url = f"memory://{uuid4().hex}"
    store = ObjectStore(url, retries=Retries(num_tries=3))
    store.put(NAME, b"x")
    again = pickle.loads(pickle.dumps(store))
    assert again.read(NAME) == b"x"
    assert again.retries.num_tries == 3


def test_listings_are_fresh():
    url = f"memory://{uuid4().hex}"
    one, other = ObjectStore(url), ObjectStore(url)
    assert one.names(DATA) == []
    other.put(NAME, b"x")
    assert one.names(DATA) == [NAME]
    other.remove(NAME)
    assert one.names(DATA) == []


# --- retries ------------------------------------------------------------------------------------


def failing_call(*errors):
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_pauses_double_up_to_a_limit_and_are_spread(caplog):
    slept: list[float] = []
    retries = Retries(num_tries=6, longest_seconds=3.0, sleep=slept.append, rng=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        assert retries.call(failing_call(*[TimeoutError("slow")] * 5), what="a call") == "done"
    assert slept == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert caplog.messages[0] == "a call: slow; trying again in 0.2 s"
    slept.clear()
    spread = Retries(num_tries=2, sleep=slept.append, rng=lambda: 0.5)
    spread.call(failing_call(OSError(errno.ENOSPC, "full")), what="a call")
    assert slept == [0.375]


def test_the_last_error_is_raised():
    retries = Retries(num_tries=2, sleep=lambda seconds: None)
    with pytest.raises(OSError, match="second"):
        retries.call(failing_call(OSError("first"), OSError("second")), what="a call")
    with pytest.raises(ValueError, match="num_tries 0 is below 1"):
        Retries(num_tries=0)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EINVAL, errno.ENOSYS])
def test_a_refusal_is_not_tried_again(number):
    assert not may_pass(OSError(number, "no"))
    with pytest.raises(OSError, match="no"):
        Retries(sleep=pytest.fail).call(failing_call(OSError(number, "no")), what="a call")


def test_a_call_that_is_not_retried_fails_at_once():
    with pytest.raises(OSError, match="once"):
        NO_RETRIES.call(failing_call(OSError("once")), what="a call")


# --- the store that breaks ----------------------------------------------------------------------


def test_faults_do_what_they_say():
    memory, faults = MemoryStore(), []
    store = FaultStore(memory, lambda op, name: faults.pop(0) if faults else None)
    faults[:] = [Fault.ERROR_BEFORE, Fault.ERROR_AFTER]
    with pytest.raises(OSError, match="not done"):
        store.put(NAME, b"x")
    assert memory.contents == {}
    with pytest.raises(OSError, match="done, and answered with an error"):
        store.put(NAME, b"x")
    assert memory.contents == {NAME: b"x"}
    assert store.names(DATA) == [NAME]
    memory.remove(NAME)
    faults[:] = [Fault.STALE]
    assert store.names(DATA) == [NAME]
    assert store.names(DATA) == []
    faults[:] = [Fault.LATE]
    with pytest.raises(TimeoutError):
        store.put_if_absent(NAME, b"late")
    assert (store.num_under_way, store.exists(NAME)) == (1, False)
    store.land()
    assert store.read(NAME) == b"late"
    assert store.num_calls == 8
    assert PRIVATE not in memory.contents
