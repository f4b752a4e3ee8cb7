"""The benchmark measures what it says, and refuses what would make its figures wrong."""

import json

import pytest
from tiny import requests, tiny_engine
from tiny_checkpoint import save_tiny_checkpoint

from bastion_batch.bench.methods import ArmRun, alternate, engine_arm, speed_ratio
from bastion_batch.bench.run import BenchConfig, run_bench, table
from bastion_batch.errors import InputError


def prompts(count):
    return [request.prompt_ids for request in requests(count)]


def test_the_ratio_is_of_pairs_and_not_of_sums():
    slow = [ArmRun(100, seconds, None) for seconds in (1.0, 10.0, 2.0)]
    fast = [ArmRun(100, seconds / 2, None) for seconds in (1.0, 10.0, 2.0)]
    assert speed_ratio(fast, slow) == (2.0, 2.0, 2.0)


def test_arms_take_turns_and_warm_up_once():
    calls = []

    def arm(name):
        def run(group):
            calls.append((name, len(group)))
            return ArmRun(1, 1.0, None)

        return run

    alternate({"a": arm("a"), "b": arm("b")}, [prompts(2), prompts(2)])
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 2), ("a", 2)]


def test_an_arm_counts_what_its_engine_did():
    engine = tiny_engine("llama", "dflash", method="bastion")
    run = engine_arm(engine, max_new_tokens=16)
    first, second = run(prompts(3)), run(prompts(2))
    assert first.num_tokens == sum(map(len, first.outputs))
    assert first.outputs[:2] == second.outputs, "greedy text is the same every time"
    assert first.totals.num_committed == first.num_tokens
    assert second.totals.num_committed == second.num_tokens, "not what the first call did"


@pytest.fixture
def setting(tmp_path):
    save_tiny_checkpoint(tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"line {n}"}) for n in range(4)))
    return {"target": str(tmp_path), "drafter": None, "prompts": file, "dtype": "float32"}


def test_a_report_has_every_arm_and_its_ratios(setting):
    arms = ("ar", "bastion", "transformers")
    report = run_bench(BenchConfig(**setting, methods=arms, num_prompts=4, max_new_tokens=8))
    assert list(report["arms"]) == list(arms)
    assert report["same_text"] == dict.fromkeys(arms, 1.0)
    assert set(report["ratios"]) == {
        "bastion/ar", "transformers/ar", "ar/transformers", "bastion/transformers"
    }  # fmt: skip
    assert report["setting"]["dtype"] == "float32"
    assert json.loads(json.dumps(report))["ratios"] == report["ratios"]
    assert all(name in table(report) for name in arms)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"methods": ("ar", "eagle")}, "eagle"), ({"prompts": "no-such-file.jsonl"}, "no-such-file")],
)
def test_what_cannot_be_measured_is_named(setting, options, named):
    from pathlib import Path

    options = {key: Path(v) if key == "prompts" else v for key, v in options.items()}
    with pytest.raises(InputError, match=named):
        run_bench(BenchConfig(**{**setting, **options}))
