"""A directory is built once, whoever asks at the same time and whatever is killed."""

import multiprocessing
import os
import time
from pathlib import Path

from bastion_batch.engine.model_cache import build_once, is_whole

SPAWN = multiprocessing.get_context("spawn")


def slow_build(directory: Path) -> None:
    with (directory.parent / "log").open("a") as log:
        log.write("built\n")
    (directory / "first.safetensors").write_bytes(b"x" * 200_000)
    time.sleep(0.3)
    (directory / "second.json").write_text("{}")


def endless_build(directory: Path) -> None:
    (directory / "first.safetensors").write_bytes(b"half")
    time.sleep(60)


def num_builds(directory: Path) -> int:
    return (directory.parent / "log").read_text().count("built")


def test_processes_that_ask_at_once_share_one_build(tmp_path):
    directory = tmp_path / "model"
    processes = [SPAWN.Process(target=build_once, args=(directory, slow_build)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert is_whole(directory)
    assert num_builds(directory) == 1


def test_a_killed_build_is_never_seen_and_the_next_one_heals(tmp_path):
    directory, part = tmp_path / "model", tmp_path / "model.part"
    process = SPAWN.Process(target=build_once, args=(directory, endless_build))
    process.start()
    while not (part / "first.safetensors").exists():
        assert process.is_alive()
    process.kill()
    process.join(60)
    assert not directory.exists()
    build_once(directory, slow_build)
    assert is_whole(directory)
    assert not part.exists()


def test_a_damaged_directory_is_built_again(tmp_path):
    directory = build_once(tmp_path / "model", slow_build)
    build_once(directory, slow_build)
    assert num_builds(directory) == 1
    os.truncate(directory / "first.safetensors", 100_000)
    assert not is_whole(directory)
    build_once(directory, slow_build)
    assert is_whole(directory)
    assert num_builds(directory) == 2


def test_other_users_may_read_it(tmp_path):
    directory = build_once(tmp_path / "model", slow_build)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in directory.iterdir())
