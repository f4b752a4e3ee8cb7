"""Calibration: which passes are timed, within which bounds, and what is said of them."""

import json
import time

import pytest
from tiny import tiny_drafter, tiny_target
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.cli import main
from bastion_batch.engine.calibration import CalibrationConfig, run_calibration, table
from bastion_batch.engine.costs import DraftLoad
from bastion_batch.engine.drafters.fakes import MuteDrafter
from bastion_batch.engine.latency import (
    COARSE,
    MAX_CACHE_BYTES,
    THOROUGH,
    DraftPoint,
    Point,
    measure,
    time_draft,
    time_verify,
)
from bastion_batch.engine.profiles import profiles_dir


def test_the_grids_cover_tokens_rows_and_contexts_and_the_thorough_one_begins_with_the_coarse():
    assert THOROUGH.verify[: len(COARSE.verify)] == COARSE.verify
    assert len(set(THOROUGH.verify)) == len(THOROUGH.verify) > 80
    for grid in (COARSE, THOROUGH):
        assert all(1 <= point.num_rows <= point.num_tokens for point in grid.verify)
        first = grid.verify[:8]
        assert min(len({point[axis] for point in first}) for axis in range(3)) >= 2
    assert {point.context for point in THOROUGH.verify} >= {128, 512, 2000}
    assert {point.num_rows for point in THOROUGH.verify} >= {1, 4, 16, 32}
    assert {point.num_tokens for point in THOROUGH.verify} >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert COARSE.verify_seconds + COARSE.draft_seconds < 15
    assert THOROUGH.verify_seconds + THOROUGH.draft_seconds < 60


def test_the_thorough_grid_is_spread_from_the_start():
    """Where time runs out half way, every value of every axis has been seen."""
    half = THOROUGH.verify[: len(THOROUGH.verify) // 2]
    for axis in range(3):
        assert {point[axis] for point in half} == {point[axis] for point in THOROUGH.verify}


def test_passes_are_timed_as_they_are_asked_for():
    timings = time_verify(tiny_target("llama"), (), [Point(1, 1, 40), Point(7, 3, 60)], 60.0)
    assert [timing[:3] for timing in timings] == [(1, 1, 40), (7, 3, 180)]
    assert all(timing.seconds > 0 for timing in timings)


def test_contexts_beyond_the_targets_positions_are_cut():
    points = [Point(4, 1, 40), Point(4, 1, 511), Point(4, 1, 5000), Point(600, 1, 10)]
    timings = time_verify(tiny_target("llama"), (), points, 60.0)  # of 512 positions
    assert [timing[:3] for timing in timings] == [(4, 1, 40), (4, 1, 508)]


def test_a_pass_whose_cache_would_be_too_large_is_left_out():
    target = tiny_target("llama")
    rows = 2 * MAX_CACHE_BYTES // (400 * target.new_cache().bytes_per_token)
    assert len(time_verify(target, (), [Point(1, 1, 40), Point(rows, rows, 400)], 60.0)) == 1


def test_when_time_is_up_no_further_pass_begins():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    assert len(time_verify(target, (), COARSE.verify, 0.0)) == 1, "one there always is"
    assert len(time_draft(target, drafter, COARSE.draft, 0.0)) == 1
    many = [Point(1, 1, 1 + number) for number in range(500)]
    start = time.perf_counter()
    assert 1 < len(time_verify(target, (), many, 0.6)) < len(many)
    assert time.perf_counter() - start < 30, "far less, but the machine may be busy"


def test_a_drafter_is_left_as_it_was():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    timings = time_draft(target, drafter, [DraftPoint(99, 3, 50), DraftPoint(2, 1, 80)], 60.0)
    assert [timing[:3] for timing in timings] == [(18, 3, 150), (3, 1, 80)]
    assert not any(cache.num_open for cache in drafter.caches)


def test_costs_know_the_draft_pass_only_where_there_is_one():
    target = tiny_target("llama")
    drafted = measure(target, tiny_drafter(target))
    assert drafted.costs.draft is not None
    assert drafted.costs.draft_seconds(DraftLoad(10, 2, 100)) > 0
    for drafter in (None, MuteDrafter()):
        plain = measure(target, drafter)
        assert plain.costs.draft is None
        assert plain.costs.draft_seconds(DraftLoad(10, 2, 100)) == 0
        assert plain.draft_timings == []


# The command


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path / "profiles"))
    return str(save_tiny_checkpoint(tmp_path / "model"))


def test_the_report_says_what_was_measured_predicted_and_fitted(checkpoint):
    config = CalibrationConfig(target=checkpoint, drafter=None, dtype="float32", thorough=False)
    report = run_calibration(config)
    assert json.loads(json.dumps(report)) == report
    assert report["draft"] == []
    assert len(report["verify"]) >= 4
    for row in report["verify"]:
        assert row["seconds"] > 0
        assert row["predicted_seconds"] > 0
    text = table(report)
    assert "measured:" in text, "where peak and bandwidth come from"
    assert text.count(" ms") == 2 * len(report["verify"])
    assert ("never bound" in text) == bool(report["models"]["verify"]["unidentified"])


def test_calibrate_ends_in_json_and_saves_the_profile(checkpoint, capsys):
    arguments = ["--target", checkpoint, "--drafter", "none", "--dtype", "float32", "--quick"]
    assert main(["calibrate", *arguments, "--threads", "1", "--force"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (file,) = profiles_dir().iterdir()
    assert report["profile"] == str(file)
    assert json.loads(file.read_text())["key"]["threads"] == 1
    assert report["models"]["verify"]["peak_flops"] > 0


def test_calibrate_refuses_what_it_cannot_load(capsys):
    assert main(["calibrate", "--target", "no-such-model", "--force"]) == 2
    assert "no-such-model" in capsys.readouterr().err
