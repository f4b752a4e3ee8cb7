"""What is left of a local Ray ends soon after its driver, and only that."""

import subprocess
import sys

import pytest

from bastion_batch.cluster import reaper
from bastion_batch.cluster.reaper import Reaper, users_of


@pytest.fixture
def agent(tmp_path):
    """A process that has a file of the session open."""
    code = f"log = open({str(tmp_path / 'log')!r}, 'w'); print('', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_driver_that_dies_takes_what_is_left_with_it(agent, tmp_path):
    assert list(users_of(f"{tmp_path}/")) == [agent.pid]
    subprocess.run([sys.executable, reaper.__file__, tmp_path], stdin=subprocess.DEVNULL)
    assert agent.wait(timeout=1) == -9


def test_after_an_orderly_end_nothing_is_done(agent, tmp_path):
    Reaper(str(tmp_path)).dismiss()
    assert agent.poll() is None


def test_other_directories_are_left_alone(agent, tmp_path):
    assert list(users_of(f"{tmp_path}/other/")) == []
