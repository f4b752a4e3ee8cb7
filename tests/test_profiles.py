"""Profiles: found again under the same key, ignored when damaged, never the cause of a failure."""

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import fixed_costs, requests, tiny_drafter, tiny_target
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.core.devices import KNOWN_DEVICES
from bastion_batch.core.roofline import Timing
from bastion_batch.engine import Engine
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.keyed_files import MAX_FILES, file_name, profiles_dir, put
from bastion_batch.engine.latency import still_holds, time_briefly
from bastion_batch.engine.profiles import (
    Profile,
    acceptance_of,
    costs_of,
    load_profile,
    profile_key,
    save_profile,
)

KEY = {"device": "abacus", "threads": 1, "drafter": None}


def profile(**key) -> Profile:
    return Profile(key=KEY | key, costs={"verify": 1}, acceptance={"seen": [0.5]})


# Files


def test_a_profile_is_found_under_its_key_and_no_other(tmp_path):
    save_profile(profile(), tmp_path)
    assert load_profile(KEY, tmp_path) == profile()
    assert load_profile(KEY | {"threads": 2}, tmp_path) is None


def test_the_later_of_two_stays(tmp_path):
    save_profile(profile(), tmp_path)
    save_profile(Profile(key=KEY, costs={"verify": 2}), tmp_path)
    assert load_profile(KEY, tmp_path).costs == {"verify": 2}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_key_stands_in_the_file_in_clear(tmp_path):
    save_profile(profile(), tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["key"] == KEY


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: '"text"',
        lambda text: json.dumps({"key": KEY}),
        lambda text: text.replace("abacus", "slide rule"),
        lambda text: "\udcff",
    ],
    ids=["cut", "empty", "list", "string", "no costs", "foreign", "not utf-8"],
)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, caplog, damage):
    save_profile(profile(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_text()).encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert load_profile(KEY, tmp_path) is None
    assert "is ignored" in caplog.text
    save_profile(profile(), tmp_path)
    assert load_profile(KEY, tmp_path) == profile(), "the next run mends it"


def test_a_directory_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        save_profile(profile(), tmp_path / "file" / "profiles")
    assert "cannot be saved" in caplog.text
    assert load_profile(KEY, tmp_path / "nowhere") is None


def test_old_profiles_make_room(tmp_path):
    for number in range(MAX_FILES + 5):
        path = save_profile(profile(threads=number), tmp_path)
        os.utime(path, (number, number))
    save_profile(profile(threads=999), tmp_path)
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    assert load_profile(KEY | {"threads": 0}, tmp_path) is None
    assert load_profile(KEY | {"threads": MAX_FILES + 4}, tmp_path) is not None


def test_locks_are_not_cleared_away(tmp_path):
    locks = [tmp_path / f"{number}.lock" for number in range(MAX_FILES)]
    for lock in locks:
        lock.touch()
        os.utime(lock, (0, 0))
    save_profile(profile(), tmp_path)
    assert load_profile(KEY, tmp_path) == profile()
    assert all(lock.exists() for lock in locks)


def test_any_number_may_save_and_load_at_the_same_time(tmp_path, caplog):
    """Threads here: what matters is that a file appears whole, whoever looks."""

    def save_and_load(number):
        for _ in range(50):
            save_profile(Profile(key=KEY, costs={"verify": [number] * 1000}), tmp_path)
            assert load_profile(KEY, tmp_path) is not None

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        list(pool.map(save_and_load, range(4)))
    assert not caplog.text, "never half a file"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


# Keys


def test_a_key_tells_engines_apart():
    target = tiny_target("llama")
    keys = [
        profile_key(target, "a", "b"),
        profile_key(target, "c", "b"),
        profile_key(target, "a", None),
        profile_key(target, "a", "b", execution="graphs"),
        profile_key(target, "a", "b", attention="tree"),
        profile_key(tiny_target("llama", dtype=torch.float32), "a", "b"),
    ]
    torch.set_num_threads(2)
    try:
        keys.append(profile_key(target, "a", "b"))
    finally:
        torch.set_num_threads(1)
    assert len({json.dumps(key) for key in keys}) == len(keys)
    assert keys[0] == profile_key(target, "a", "b")
    assert all(keys[0][part] for part in ("device", "cpu", "torch", "bastion_batch"))


# What is in them


def timings_of(costs: StepCosts, *factors: float) -> list[Timing]:
    """Passes that take so many times what costs predict."""
    return [
        Timing(n, 1, 128, factor * costs.verify.seconds(n, 1, 128))
        for n, factor in zip((1, 16), factors, strict=True)
    ]


@pytest.mark.parametrize(
    ("factors", "scaled_by"),
    [((1.0, 1.0), 1.0), ((1.2, 1.1), 1.0), ((2.0, 2.0), 2.0), ((0.45, 0.55), 0.4975)],
)
def test_costs_hold_up_to_a_factor_which_is_taken_over(factors, scaled_by):
    costs = fixed_costs(tiny_target("llama"))
    before = costs.verify.seconds(7, 2, 300)
    assert still_holds(costs, timings_of(costs, *factors))
    assert costs.verify.seconds(7, 2, 300) == pytest.approx(scaled_by * before, rel=1e-3)


@pytest.mark.parametrize("factors", [(1.0, 1.5), (3.0, 1.0)])
def test_costs_of_another_shape_do_not_hold(factors):
    costs = fixed_costs(tiny_target("llama"))
    assert not still_holds(costs, timings_of(costs, *factors))


def test_costs_are_held_against_this_device():
    """Costs by which 16 tokens take a thousand times one: no machine is so busy."""
    target = tiny_target("llama")
    costs = fixed_costs(target)
    small, large = time_briefly(target, None)
    costs.verify.fit([small, large._replace(seconds=1000 * large.seconds)])
    assert costs_of(Profile(key=KEY, costs=costs.to_dict()), target, None) is None


@pytest.mark.parametrize("costs", [{}, {"verify": {}, "draft": None, "other_seconds": 1}])
def test_costs_of_another_kind_are_ignored_with_a_warning(caplog, costs):
    with caplog.at_level(logging.WARNING):
        assert costs_of(Profile(key=KEY, costs=costs), tiny_target("llama"), None) is None
    assert "ignored" in caplog.text


def test_costs_without_a_draft_pass_do_not_serve_a_drafter(caplog):
    target = tiny_target("llama")
    kept = Profile(key=KEY, costs=fixed_costs(target).to_dict())
    assert costs_of(kept, target, tiny_drafter(target)) is None


def test_what_is_known_of_acceptance_is_taken_over_or_ignored_with_a_warning(caplog):
    learnt = AcceptanceModel(5).to_dict()
    assert acceptance_of(Profile(key=KEY, costs={}, acceptance=learnt), 5).to_dict() == learnt
    assert acceptance_of(Profile(key=KEY, costs={}), 5) is None
    for damaged in ({}, [1], learnt | {"trials": "many"}):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert acceptance_of(Profile(key=KEY, costs={}, acceptance=damaged), 5) is None
        assert "ignored" in caplog.text


# Engines


def test_an_engine_begins_with_what_another_one_learnt(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path / "profiles"))
    checkpoint = str(save_tiny_checkpoint(tmp_path / "model"))

    def engine():
        return Engine.from_pretrained(checkpoint, None, dtype="float32")

    first = engine()
    texts = {c.row_id: c.output_ids for c in first.generate(requests(2, 8))}
    assert not profiles_dir().exists(), "nothing is saved unasked"
    first.save_profile()
    (file,) = profiles_dir().iterdir()
    file.write_text(file.read_text().replace("measured:", "on file:"))
    # A busy machine may contradict what is on file at one start, and not at every one.
    for _ in range(40):
        later = engine()
        source = later.info.calibration["verify"]["speed_source"]
        if source.startswith("on file:"):
            break
    assert source.startswith("on file:")
    assert {c.row_id: c.output_ids for c in later.generate(requests(2, 8))} == texts


def test_an_engine_without_a_profile_neither_reads_nor_writes_one(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path / "profiles"))
    checkpoint = str(save_tiny_checkpoint(tmp_path / "model"))
    Engine.from_pretrained(checkpoint, None, dtype="float32", profile=False).save_profile()
    assert not profiles_dir().exists()


# Known devices


def test_every_known_device_has_plausible_figures_and_a_source():
    for name, speed in KNOWN_DEVICES.items():
        assert name.startswith("NVIDIA ")
        assert 100e12 < speed.flops < 3000e12
        assert 250e9 < speed.bandwidth <= 8e12
        assert "BF16" in speed.source
        assert "B/s" in speed.source


def test_what_is_not_a_profile_is_left_alone(tmp_path):
    others = [tmp_path / f"prompts-{number}.jsonl" for number in range(MAX_FILES + 5)]
    for path in others:
        path.write_text("{}")
    put(tmp_path / file_name({"device": "one"}), "{}")
    assert all(path.exists() for path in others)
