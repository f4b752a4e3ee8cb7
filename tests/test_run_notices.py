"""Notices: files that name nothing or hosts, sources that fail; and logs, one for each process."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from fault_store import MemoryStore

from bastion_batch.cluster.logs import logging_to
from bastion_batch.cluster.notices import (
    NOTICE_VARIABLE,
    Notice,
    NoticeFile,
    Notices,
    StopFile,
    notice_sources,
)
from bastion_batch.io.store import LocalStore


def test_an_empty_stop_file_stops_the_job():
    store = MemoryStore(root="/out")
    source = StopFile(store)
    assert source.poll() is None
    store.put("_bastion/stop", b"\n")
    assert source.poll() == Notice("/out/_bastion/stop is there", None)
    source.clear()
    assert source.poll() is None
    source.clear()


def test_a_file_may_name_the_hosts_that_go(tmp_path, monkeypatch):
    file = tmp_path / "notice"
    monkeypatch.setenv(NOTICE_VARIABLE, str(file))
    sources = [s for s in notice_sources(MemoryStore()) if isinstance(s, NoticeFile)]
    notices = Notices(sources)
    assert notices.poll() == []
    file.write_text("gpu-1 gpu-2\n")
    assert notices.poll() == [Notice(f"{file} names the node", frozenset({"gpu-1", "gpu-2"}))]


class Broken:
    def poll(self):
        raise PermissionError("metadata server: forbidden")


def test_a_source_that_fails_is_told_of_once_and_does_not_silence_the_others(caplog):
    store = MemoryStore(root="/out")
    store.put("_bastion/stop", b"")
    notices = Notices([Broken(), StopFile(store)])
    assert [n.reason for _ in range(3) for n in notices.poll()] == [
        "/out/_bastion/stop is there"
    ] * 3
    assert caplog.text.count("Broken cannot be asked for notices: metadata server") == 1


def log_lines(store):
    return store.read("_bastion/logs/driver-1.log").decode().splitlines()


@pytest.mark.parametrize("kind", ["files", "objects"])
def test_a_process_logs_whole_lines_to_a_file_of_its_own(tmp_path, kind):
    store = LocalStore(tmp_path) if kind == "files" else MemoryStore()
    store.make_directories()
    package = logging.getLogger("bastion_batch")
    before = package.level, list(package.handlers)
    with logging_to(store, "driver-1"):
        logging.getLogger("bastion_batch.x").info("10%%\r20%%\r%d%%", 30)
        logging.getLogger("bastion_batch.x").debug("not this")
        logging.getLogger("elsewhere").warning("nor this")
    package.warning("nor what comes later")
    [line] = log_lines(store)
    assert line.endswith(" INFO 10% 20% 30%")
    assert (package.level, package.handlers) == before


def test_warnings_are_still_shown_where_nobody_set_up_logging(tmp_path):
    code = (
        "import logging, sys\n"
        "from bastion_batch.cluster.logs import logging_to\n"
        "from bastion_batch.io.store import LocalStore\n"
        "store = LocalStore(sys.argv[1]); store.make_directories()\n"
        "with logging_to(store, 'driver-1'):\n"
        "    logging.getLogger('bastion_batch.x').warning('look here')\n"
        "    logging.getLogger('bastion_batch.x').info('only in the file')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert ended.stderr == "look here\n"
    assert len(log_lines(LocalStore(tmp_path))) == 2
