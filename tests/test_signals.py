"""What the first SIGINT or SIGTERM does to a driver whose end hangs."""

import signal
import subprocess
import sys

import pytest

HANGING = """
import os, signal, sys, time
from bastion_batch.cluster.signals import StopSignals

signals = StopSignals(lambda line: print(line, file=sys.stderr, flush=True))
signals.deferred = True
with signals:
    with signals.end_within(float(sys.argv[2]), lambda: print("saved", flush=True)):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(float(sys.argv[3]))
    time.sleep(float(sys.argv[4]))
    print("ended in order")
"""


def end_of(signum, patience, inside, outside):
    arguments = [str(number) for number in (int(signum), patience, inside, outside)]
    return subprocess.run(
        [sys.executable, "-c", HANGING, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_hangs_is_bounded(signum):
    ended = end_of(signum, patience=0.2, inside=30, outside=0)
    assert ended.returncode == 128 + signum
    assert ended.stdout == "saved\n"
    assert ended.stderr == (
        "stopping; once more ends at once\nthe end took longer than 0 s; ending without it\n"
    )


def test_an_end_in_time_is_left_alone():
    ended = end_of(signal.SIGTERM, patience=0.5, inside=0, outside=1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "ended in order\n"
