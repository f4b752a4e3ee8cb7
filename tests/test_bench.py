"""The benchmark measures what it says, and refuses what would make its figures wrong."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import outputs_of, requests, tiny_engine
from tiny_checkpoint import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from bastion_batch.bench.blocks import Arm, LiveRows, alternate, run_block
from bastion_batch.bench.checks import measure_overhead, measure_useless
from bastion_batch.bench.drafter import _Answer
from bastion_batch.bench.drafter import report as report_of
from bastion_batch.bench.envelope import Acceptance
from bastion_batch.bench.flatness import _reading, measure_flatness
from bastion_batch.bench.peers import engine_arm, measure_peers, transformers_arm
from bastion_batch.bench.prediction import measure_prediction
from bastion_batch.bench.ratios import Share, paired_ratio
from bastion_batch.bench.run import run_bench, run_record, table
from bastion_batch.bench.setup import Bench, BenchConfig
from bastion_batch.cli import main
from bastion_batch.errors import InputError
from bastion_batch.records import SamplingParams


def silent(line):
    """No progress."""


# Ratios


def test_the_ratio_is_of_pairs_and_not_of_sums():
    slow = [Share(100, seconds) for seconds in (1.0, 10.0, 2.0)]
    fast = [Share(100, seconds / 2) for seconds in (1.0, 10.0, 2.0)]
    assert paired_ratio(fast, slow) == (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3)


def test_a_drift_of_the_machine_cancels_in_the_pairs():
    drift = [1.0 + 0.2 * group for group in range(20)]
    slow = [Share(50, seconds) for seconds in drift]
    fast = [Share(60, seconds) for seconds in drift]
    ratio = paired_ratio(fast, slow)
    assert ratio.low == pytest.approx(1.2) == ratio.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(60):
        noise = torch.randn(2, 24, generator=generator).mul(0.15).exp().tolist()
        fast, slow = ([Share(100, seconds) for seconds in arm] for arm in noise)
        ratio = paired_ratio(fast, slow)
        covered += ratio.low <= 1.0 <= ratio.high
    assert 45 <= covered <= 60, "of 60 intervals of 90 %"


def test_ratios_need_pairs():
    with pytest.raises(ValueError, match="1 groups against 2"):
        paired_ratio([Share(1, 1.0)], [Share(1, 1.0)] * 2)
    with pytest.raises(ValueError, match="pairs are needed"):
        paired_ratio([], [])


# Blocks on live rows

GREEDY = SamplingParams(max_new_tokens=24)


def prompts(count):
    return [request.prompt_ids for request in requests(count)]


def all_arms(rows):
    return [
        Arm("ar", rows, "ar"),
        Arm("dflash", rows, "dflash"),
        Arm("ddtree", rows, "ddtree", 5),
        Arm("bastion", rows, "bastion"),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_taking_turns_leaves_every_text_alone(temperature):
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
    engine, found = tiny_engine(drafter="dflash", max_batch=3), []
    rows = LiveRows(engine, prompts(5), sampling, found.append)
    groups = alternate(all_arms(rows), seconds=0.0, block_steps=3, min_groups=6)
    rows.drain()
    engine.check_integrity()
    texts = {c.row_id: c.output_ids for c in found}
    assert len(groups) == 6
    assert len(texts) >= 8
    assert {len({r.method for r in c.records}) for c in found} - {1, 2}, "rows saw several methods"
    assert texts == plain_texts(rows, texts, sampling)


def plain_texts(rows, wanted, sampling):
    """The same requests, decoded plainly one by one."""
    again = LiveRows(rows.engine, prompts(5), sampling)
    made = [request for request, _ in zip(again._requests, range(len(wanted)), strict=False)]
    return dict(
        zip([r.row_id for r in made], outputs_of(tiny_engine(max_batch=1), made), strict=True)
    )


def test_a_block_counts_full_steps_without_prompts_only():
    engine = tiny_engine(drafter="dflash", max_batch=3)
    rows = LiveRows(engine, prompts(5), GREEDY)
    block = run_block(Arm("ddtree", rows, "ddtree", 4), 10)
    assert block.num_steps == 10
    assert block.num_row_steps == 30, "a full batch in every step"
    assert 90 <= block.num_nodes <= 120, "four a row, but near a row's end"
    assert block.num_tokens >= 30
    assert 0 < block.seconds < 10
    run_block(Arm("ar", rows, "ar"), 3)
    assert run_block(Arm("ar", rows, "ar"), 3).num_nodes == 0, "the method was changed"


def test_rows_begin_at_unequal_lengths_and_stay_as_many():
    engine, found = tiny_engine(max_batch=4), []
    rows = LiveRows(engine, prompts(6), SamplingParams(max_new_tokens=40), found.append)
    for _ in range(60):
        rows.step()
    lengths = {c.row_id: c.num_output_tokens for c in found}
    assert lengths["0"] <= 10
    assert lengths["1"] <= 20


def test_rows_may_begin_in_the_midst_of_their_output():
    """Contexts are as unequal, and on average as long, as after a while."""
    engine = tiny_engine(max_batch=4)
    rows = LiveRows(engine, prompts(6), SamplingParams(max_new_tokens=40), in_midst=True)
    rows.step()
    made_up = (0, 10, 20, 30)
    lengths = sorted(engine.num_tokens().values())
    assert [n - m in (0, 1) for n, m in zip(lengths, made_up, strict=True)] == [True] * 4
    for _ in range(60):
        rows.step()
    rows.step()  # replaces what has just ended
    assert len(set(engine.num_tokens().values())) >= 3, "they stay unequal"


def test_arms_take_turns_forwards_and_backwards():
    engine, lines = tiny_engine(drafter="dflash", max_batch=2), []
    arms = all_arms(LiveRows(engine, prompts(4), GREEDY))
    groups = alternate(arms, seconds=0.0, block_steps=1, min_groups=2, progress=lines.append)
    assert [[block.arm for block in group] for group in groups] == [[a.name for a in arms]] * 2
    order = [[part.split()[0] for part in line.partition(": ")[2].split(", ")] for line in lines]
    assert order == [[a.name for a in arms], [a.name for a in reversed(arms)]]


def test_expected_and_realised_tokens_are_of_bastions_own_steps():
    engine, acceptance = tiny_engine(drafter="dflash", max_batch=2), Acceptance()
    rows = LiveRows(engine, prompts(4), GREEDY, acceptance.add)
    run_block(Arm("dflash", rows, "dflash"), 30)
    rows.drain()
    assert acceptance.report() is None
    rows = LiveRows(engine, prompts(4), GREEDY, acceptance.add)
    block = run_block(Arm("bastion", rows, "bastion"), 30, uncounted_steps=0)
    rows.drain()
    report = acceptance.report()
    assert 0 < report["num_row_steps"] <= block.num_row_steps + 60
    assert report["expected_over_realised"] > 0.5


# Whole measurements, on a checkpoint made here


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    target, drafter = directory / "target", directory / "drafter"
    save_tiny_checkpoint(target)
    save_drafter(drafter)
    file = directory / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"line {n}" * (1 + n)}) for n in range(8)))
    return {
        "target": str(target),
        "drafter": str(drafter),
        "prompts": file,
        "dtype": "float32",
        "max_new_tokens": 12,
        "seconds": 0.1,
        "block_steps": 3,
        "warm_up_row_steps": 6,
        "warm_up_steps": 5,
        "nodes_per_row": (1, 4),
    }


def save_drafter(path: Path) -> None:
    """A DFlash drafter with random weights for the target of `save_tiny_checkpoint`."""
    hidden, ffn, heads, size, taps = 32, 48, 4, 8, [0, 1]
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": size, "vocab_size": 257, "block_size": 5,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": 0},
    }  # fmt: skip
    shapes = {
        "fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,),
        "layers.0.input_layernorm": (hidden,), "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_norm": (size,), "layers.0.self_attn.k_norm": (size,),
        "layers.0.self_attn.q_proj": (heads * size, hidden),
        "layers.0.self_attn.k_proj": (heads * size, hidden),
        "layers.0.self_attn.v_proj": (heads * size, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * size),
        "layers.0.mlp.gate_proj": (ffn, hidden), "layers.0.mlp.up_proj": (ffn, hidden),
        "layers.0.mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")


@pytest.fixture(scope="module")
def measured(setting, tmp_path_factory):
    """The report of the methods at two batch sizes, and the directory it was written to."""
    out = tmp_path_factory.mktemp("out")
    return run_bench(BenchConfig(**setting, batches=(1, 2)), out=out), out


def test_the_halves_of_the_prompts_are_apart(setting):
    bench = Bench.load(BenchConfig(**setting))
    assert not set(bench.choosing_prompts) & set(bench.comparing_prompts)
    assert len({*bench.choosing_prompts, *bench.comparing_prompts}) == len(bench.prompts) == 8


def test_what_was_best_on_one_half_is_compared_on_the_other(measured):
    report = measured[0]["batches"][1]
    speeds = {name: arm["tokens_per_second"] for name, arm in report["tried"].items()}
    assert list(speeds) == ["ar-alone", "ar", "dflash", "ddtree-1", "ddtree-4"]
    best_tree = max(("ddtree-1", "ddtree-4"), key=speeds.__getitem__)
    compared = list(report["arms"])
    assert [name for name in compared if name != "dflash"] == [
        "ar-alone",
        "ar",
        best_tree,
        "bastion",
    ]
    best = max(speeds, key=speeds.__getitem__)
    assert best in compared
    assert report["envelope"]["best_fixed"] == best
    assert report["envelope"]["num_groups"] >= 2
    assert report["envelope"]["low"] <= report["envelope"]["median"] <= report["envelope"]["high"]
    few, many = report["step_curve"]["num_nodes"]
    assert 1 < few <= 2 < many <= 8
    assert report["plain_roofline_tokens_per_second"] > 0


def test_a_report_goes_to_files_and_a_picture(measured):
    report, out = measured
    stem = "methods-float32-t0"
    assert {f.name for f in out.iterdir()} == {f"{stem}-b1.json", f"{stem}-b2.json", f"{stem}.png"}
    written = json.loads((out / f"{stem}-b2.json").read_text())
    assert written == {"setting": report["setting"], "batches": report["batches"][1:]}
    assert report["setting"]["dtype"] == "float32"
    assert all(name in table(report) for name in report["batches"][0]["arms"])


def test_a_recording_is_replayed_by_the_measured_costs(setting, measured, tmp_path, capsys):
    config = BenchConfig(**{**setting, "max_new_tokens": 30}, batches=(2,))
    written = run_record(config, tmp_path / "texts.npz")
    assert written["num_positions"] > 3
    costs = measured[1] / "methods-float32-t0-b2.json"
    assert main(["bench", "--replay", str(tmp_path / "texts.npz"), "--costs", str(costs)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (part,) = report["replays"]
    assert part["policies"]["ar"]["over_plain"] == 1.0
    assert part["optimum_over_plain"] == max(p["over_plain"] for p in part["policies"].values())
    assert part["measured_over_optimum"] > 0


def test_the_checks_report_what_they_ask(setting):
    bench = Bench.load(BenchConfig(**{**setting, "seconds": 0.4}))
    overhead = measure_overhead(bench, 2, silent)["overhead"]
    assert list(overhead) == ["ar", "dflash", "ddtree", "bastion"]
    for report in overhead.values():
        assert report["num_steps"] > 0
        assert 0 < report["outside_passes_share"] < 1
        assert report["largest_gap_of_stages"] < 0.02
    prediction = measure_prediction(bench, 2, silent, contexts=(40, 90), counted_steps=10)
    contexts = prediction["prediction"]["contexts"]
    assert list(contexts) == ["40", "90"]
    for part in contexts.values():
        assert part["num_steps"] == 10
        assert 0 <= part["median_error"] <= part["ninth_decile_error"]
        assert part["verify_seconds"] > 0
    flatness = measure_flatness(bench, 2, silent, early=20, late=150, window=10)["flatness"]
    assert flatness["added_kv_bytes"] == 130 * 2 * 2 * 2 * 2 * 8 * 4, "rows, layers, k and v, heads"
    assert flatness["seconds_at_full_bandwidth"] > 0
    for name in ("added_seconds", "read_seconds"):
        low, high = flatness[f"{name}_interval"]
        assert low <= flatness[name] <= high
    assert flatness["holds"] == (flatness["added_seconds"] <= flatness["allowed_added_seconds"])
    useless = measure_useless(bench, 2, silent, num_blocks=4)["useless"]
    assert useless["num_steps"] == 100
    assert useless["bastion/ar"]["num_groups"] == 4
    assert useless["bastion/ar_after_a_quarter"]["num_groups"] == 3


def test_predictions_are_of_the_full_batch_however_long_its_prompts_take(setting, monkeypatch):
    bench = Bench.load(BenchConfig(**setting))
    monkeypatch.setattr("bastion_batch.engine.engine.prompt_room", lambda *args: 4)
    prediction = measure_prediction(bench, 8, silent, contexts=(90,), counted_steps=10)
    assert prediction["prediction"]["contexts"]["90"]["num_steps"] == 10


def test_a_stack_that_reads_other_memory_decodes_the_same_text(setting):
    bench = Bench.load(BenchConfig(**setting))
    num_layers = bench.target.stack.config.num_layers
    reading = _reading(bench, torch.ones(num_layers, 50, dtype=torch.int32))
    decode = [engine_arm(b.engine(2, None, "ar"), bench.config.sampling) for b in (bench, reading)]
    texts, same = (arm(bench.prompts[:4]).outputs for arm in decode)
    assert texts == same
    assert reading.target.stack is not bench.target.stack
    with pytest.raises(ValueError, match="zip"):
        _reading(bench, torch.ones(num_layers + 1, 50, dtype=torch.int32))


def test_peers_decode_the_same_prompts(setting):
    bench = Bench.load(BenchConfig(**{**setting, "drafter": None}))
    alone = measure_peers(bench, 1, silent)["workloads"]["single"]
    assert {name: arm["same_text"] for name, arm in alone["arms"].items()} == {
        "ar": 1.0,
        "transformers": 1.0,
    }
    together = measure_peers(bench, 2, silent)["workloads"]
    assert list(together) == ["equal", "ragged"]
    for workload in together.values():
        assert set(workload["ratios"]) == {"ar/transformers"}
        assert workload["arms"]["transformers"]["same_text"] > 0.5, "padding may tip near-ties"


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_padded_batch_of_the_peer_ends_rows_as_the_engine_does(setting, ignore_eos):
    bench = Bench.load(BenchConfig(**{**setting, "drafter": None}))
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=ignore_eos)
    module = AutoModelForCausalLM.from_pretrained(bench.target_path).eval()
    ours = engine_arm(bench.engine(2, None, "ar"), sampling)(bench.prompts[:4])
    theirs = transformers_arm(module, sorted(bench.target.ids.end), sampling, 2)(bench.prompts[:4])
    assert sum(a == b for a, b in zip(ours.outputs, theirs.outputs, strict=True)) >= 3
    assert theirs.share.num_tokens == sum(map(len, theirs.outputs))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"methods": ("ar", "eagle")}, "eagle"),
        ({"prompts": Path("no-such-file.jsonl")}, "no-such-file"),
        ({"batches": (4, 0)}, "batch sizes"),
    ],
)
def test_what_cannot_be_measured_is_named(setting, options, named):
    with pytest.raises(InputError, match=named):
        BenchConfig(**{**setting, **options})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--measure", "luck"], "luck"),
        (["--batch", "few"], "--batch few"),
        (["--replay", "x.npz"], "--costs"),
        (["--replay", "x.npz", "--costs", "no-such.json"], r"x\.npz"),
    ],
)
def test_the_command_says_what_is_wrong(setting, arguments, named, capsys):
    options = ["--force", "--target", setting["target"], "--prompts", str(setting["prompts"])]
    assert main(["bench", *options, *arguments]) == 2
    assert named.replace("\\", "") in capsys.readouterr().err


# What a drafter is worth


def test_tokens_per_step_are_of_decode_steps_and_by_kind(setting, tmp_path):
    prompts = tmp_path / "Kinds.jsonl.gz"
    rows = [{"prompt": "one two", "kind": "short"}, {"prompt": "three"}, {"prompt": "four"}]
    prompts.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    config = BenchConfig(**setting | {"prompts": prompts, "methods": ("dflash", "ddtree")})
    report = run_bench(config, "drafter", out=tmp_path / "out")
    found = report["batches"][0]["drafter"]
    assert list(found) == ["dflash", "ddtree-64"]
    for method in found.values():
        assert {kind: f["num_prompts"] for kind, f in method["kinds"].items()} == {
            "short": 1,
            "Kinds": 2,
        }
        assert method["all"]["num_prompts"] == 3
        assert method["all"]["num_steps"] == sum(f["num_steps"] for f in method["kinds"].values())
        assert 1 <= method["all"]["low"] <= method["all"]["tokens_per_step"]
    assert (tmp_path / "out" / "drafter-float32-t0-kinds-b1.json").is_file()
    assert "Kinds" in table(report)


def test_a_trees_tokens_per_step_are_those_of_its_steps():
    steps = report_of([_Answer("a", 6, 3, (1, 2, 0)), _Answer("b", 4, 4, (0, 0, 0, 0))])
    assert steps["all"]["tokens_per_step"] == round(10 / 7, 4)
    assert steps["all"]["mean_of_prompts"] == 1.5
    assert steps["all"]["accepted_at_depth"] == [round(2 / 7, 4), round(1 / 7, 4)]
    assert steps["kinds"]["a"]["tokens_per_step"] == 2.0
