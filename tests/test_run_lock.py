"""Who drives a job: no two machines' clocks are compared, and the dead hold nothing."""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from fault_store import Fault, FaultStore, MemoryStore

from bastion_batch.cluster.driver_lock import (
    DRIVER,
    DriverLock,
    has_ended,
    read_driver,
    this_process,
)
from bastion_batch.errors import OutputError
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import LocalStore

QUICK = {"touch_seconds": 0.05, "stale_seconds": 0.4}


@pytest.fixture
def store():
    return MemoryStore(root="/out")


def me(invocation=1, **changes):
    return replace(this_process(invocation), **changes)


def elsewhere(invocation=1, **changes):
    return me(invocation, machine="another boot", host="far", pid=7, **changes)


def refusal(store, driver, **options):
    with pytest.raises(OutputError) as refused, DriverLock(store, driver, **QUICK | options):
        pass
    return str(refused.value)


def test_a_second_driver_is_refused_and_told_who_runs(store):
    first = me(1, ray_job="raysubmit_1")
    with DriverLock(store, first):
        message = refusal(store, me(2))
        assert f"process {first.pid} on {first.host}, Ray job raysubmit_1" in message
        assert f"since {first.since}, touched at most 0 s ago" in message
        assert "--takeover" in message
        assert not has_ended(read_driver(store))
    assert has_ended(read_driver(store))
    with DriverLock(store, me(2)):
        assert read_driver(store).invocation == 2


def test_a_driver_that_was_killed_on_this_machine_holds_nothing(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from bastion_batch.cluster.driver_lock import DriverLock, this_process\n"
        "DriverLock(sys.argv[1], this_process(1)).__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    store = LocalStore(tmp_path)
    store.make_directories()
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    assert not has_ended(read_driver(store))
    began = time.monotonic()
    with DriverLock(store, me(2)):
        assert time.monotonic() - began < 5, "there is nothing to wait for"
        assert read_driver(store).invocation == 2


def test_a_process_id_that_was_given_again_is_nobody(store):
    gone = me(1, process_start=this_process(1).process_start - 1)
    with DriverLock(store, gone), DriverLock(store, me(2)):
        assert read_driver(store).invocation == 2


@pytest.mark.parametrize("skew", [-1e9, 0.0, 1e9])
def test_of_another_machine_only_its_touches_count(store, skew):
    """Whatever its clock says."""
    driver = elsewhere(touched_at=skew, since="2999-01-01T00:00:00+00:00")
    told = []
    with DriverLock(store, driver, **QUICK):
        assert "process 7 on far, since 2999" in refusal(store, me(2), say=told.append)
    assert "--takeover does not wait" in told[0]


def test_a_driver_of_another_machine_that_is_silent_is_given_up(store):
    silent = DriverLock(store, elsewhere(), touch_seconds=60)
    silent.__enter__()
    began = time.monotonic()
    with DriverLock(store, me(2), **QUICK) as lock:
        assert time.monotonic() - began >= 0.4
        silent.__exit__(None, None, None)  # it wakes, and does not take back what it lost
        assert silent.superseded_by is None or silent.superseded_by.invocation == 2
        assert read_driver(store).invocation == 2
        assert lock.superseded_by is None


def test_a_silent_driver_of_this_machine_is_given_up_too(store):
    """A container whose processes are not seen from here is judged by the boot's clock."""
    hidden = me(1, pid=2**22 + 1, namespace="another")
    with DriverLock(store, hidden, touch_seconds=60):
        assert "since" in refusal(store, me(2), stale_seconds=30)
        time.sleep(0.2)
        with DriverLock(store, me(2), stale_seconds=0.1):
            assert read_driver(store).invocation == 2


def test_who_is_taken_over_finds_out_and_leaves_the_file_alone(store):
    with DriverLock(store, me(1), **QUICK) as old:
        with DriverLock(store, me(2), takeover=True, **QUICK) as new:
            deadline = time.monotonic() + 10
            while old.superseded_by is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert old.superseded_by.invocation == 2
            assert new.superseded_by is None
        assert has_ended(read_driver(store))
    assert read_driver(store).invocation == 2


def test_of_drivers_that_come_at_once_one_drives(tmp_path):
    store = LocalStore(tmp_path)
    store.make_directories()
    store.put(DRIVER, b"{ torn")
    start, stop, outcomes = threading.Barrier(4), threading.Event(), []

    def drive(invocation):
        start.wait()
        try:
            with DriverLock(store, me(invocation)):
                outcomes.append("drives")
                stop.wait()
        except OutputError:
            outcomes.append("refused")

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(outcomes) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["drives", "refused", "refused", "refused"]


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.ERROR_AFTER])
def test_storage_that_fails_now_and_then_does_not_stop_a_driver(store, fault, caplog):
    faults = iter([None, None, None, fault, None, fault])
    flaky = FaultStore(store, lambda op, name: next(faults, None))
    with DriverLock(flaky, me(1), **QUICK) as lock:
        deadline = time.monotonic() + 10
        while read_driver(store).num_touches < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert lock.superseded_by is None
    assert has_ended(read_driver(store))
    assert "cannot be touched" in caplog.text


def test_a_lost_answer_to_the_taking_is_not_a_lost_race():
    store = MemoryStore(retries=Retries(num_tries=3, sleep=lambda seconds: None))
    faults = iter([None, None, Fault.ERROR_AFTER])
    flaky = FaultStore(store, lambda op, name: next(faults, None))
    with DriverLock(flaky, driver := me(1), **QUICK):
        assert read_driver(store).nonce == driver.nonce
