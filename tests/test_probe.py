"""The probe tells a drafter that is read as it was trained from one that is not."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from probe_texts import SMOLLM2, misdescribed, reference_texts, smollm2_drafter, smollm2_target
from tiny import outputs_of, requests, tiny_drafter, tiny_engine, tiny_module, tiny_target

from bastion_batch.config import parse_job
from bastion_batch.core.paired import clustered_difference
from bastion_batch.engine import Engine
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target
from bastion_batch.engine.drafters import DraftRow
from bastion_batch.engine.drafters.description import LayerAttention
from bastion_batch.engine.drafters.formats import describe_directory
from bastion_batch.engine.keyed_files import profiles_dir
from bastion_batch.engine.own_text import OwnText, own_texts, tap_features
from bastion_batch.engine.probe import (
    LEAST_DIFFERENCE,
    NUM_ANCHORS,
    NUM_ERRORS,
    probe_on,
    probe_prompts,
    require_right_reading,
)
from bastion_batch.engine.probe_report import (
    ProbeReport,
    load_report,
    probe_key,
    save_report,
)
from bastion_batch.engine.readings import other_readings, score
from bastion_batch.engine.vocabularies import require_same_vocabulary
from bastion_batch.errors import JobFileError, ModelError


def tiny_texts(count=48, num_tokens=50) -> list[OwnText]:
    """Random text, of which a fake knows what follows."""
    rng = np.random.default_rng(3)
    return [
        OwnText((2, 3, 4), tuple(rng.integers(2, 97, num_tokens).tolist())) for _ in range(count)
    ]


class KnowingDrafter:
    """Knows some texts, the better the more its description is like the one it was trained under."""

    def __init__(self, texts, description, trained, strength=6.0):
        self.texts, self.description, self.trained = texts, description, trained
        self.strength = strength
        self.taps, self.depth = description.taps, description.depth

    def reread(self, description):
        other = copy(self)
        other.description, other.taps, other.depth = (
            description,
            description.taps,
            description.depth,
        )
        return other

    def observe(self, keys, counts, features_SF):
        assert features_SF.shape == (sum(counts), 48 * len(self.taps))

    def forget(self, key):
        pass

    def block_logits(self, rows, num_slots=None):
        width = min(self.description.block_width, num_slots)
        wrong = (self.taps != self.trained.taps) + (self.description.layers != self.trained.layers)
        generator = torch.Generator().manual_seed(len(rows[0].token_ids))
        logits = torch.randn(len(rows), width, 97, generator=generator)
        for number, row in enumerate(rows):
            text = self.texts[row.key].token_ids
            for slot in range(width):
                place = len(row.token_ids) - self.trained.first_prediction_slot + slot
                if place < len(text):
                    logits[number, slot, text[place]] += self.strength / (1 + 0.3 * wrong)
        return logits


def trained_description(**fields):
    description = tiny_drafter(tiny_target("llama")).description
    return replace(description, **({"taps": (0, 1)} | fields))


def judged(described, trained, **options) -> ProbeReport:
    texts = tiny_texts()
    return probe_on(
        KnowingDrafter(texts, described, trained, **options), tiny_target("llama"), texts
    )


KEY = probe_key("target", "drafter", trained_description())


def causal_layers(description):
    return tuple(LayerAttention(causal=True, window=None) for _ in description.layers)


def test_the_right_reading_passes():
    right = trained_description()
    report = judged(right, right)
    assert report.fault is None
    assert report.warning is None
    assert report.num_texts == 48
    assert report.num_anchors == 48 * 49
    assert [r.factor for r in report.readings] == [
        "taps",
        "taps",
        "first_prediction_slot",
        "causal",
    ]
    assert not any(r.is_better for r in report.readings)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"taps": (1, 2)}, "[1, 2] for the target layers that are tapped (target_layer_ids), and [0, 1] fits"),
        ({"taps": (-1, 0)}, "[-1, 0] for the target layers that are tapped (target_layer_ids), and [0, 1] fits"),
        (
            {"taps": (1, 2), "packaging": "speculators"},
            "[2, 3] for the target layers that are tapped (aux_hidden_state_layer_ids), and [1, 2] fits",
        ),
        (
            {"first_prediction_slot": 0},
            "0 for the slot that predicts first (architectures, projector_type), and 1 fits",
        ),
        (
            {"layers": (LayerAttention(True, None),) * 2},
            "causal for the attention inside a block (is_causal), and bidirectional fits",
        ),
    ],
    ids=["one layer late", "one layer early", "speculators", "slot", "causal"],
)  # fmt: skip
def test_a_wrong_reading_is_named_with_its_key_and_the_better_one(fields, named):
    right = trained_description()
    report = judged(replace(right, **fields), right)
    assert report.fault is not None
    assert named in report.fault
    assert "model.probe" in report.fault


def test_a_slot_late_and_a_bidirectional_reading_are_found_too():
    right = trained_description(first_prediction_slot=0, num_predictions=6)
    right = replace(right, layers=causal_layers(right))
    assert judged(right, right).fault is None
    late = replace(right, first_prediction_slot=1, num_predictions=5)
    assert "and 0 fits better" in judged(late, right).fault
    both = replace(right, layers=tuple(layer._replace(causal=False) for layer in right.layers))
    assert "and causal fits better" in judged(both, right).fault


def test_a_drafter_that_knows_nothing_is_not_refused():
    right = trained_description()
    report = judged(right, right, strength=0.0)
    assert report.fault is None
    assert "knows nothing" in report.warning


def test_a_weak_drafter_is_worth_a_warning():
    right = trained_description()
    report = judged(right, right, strength=1.5)
    assert report.fault is None
    assert "little will be accepted" in report.warning


def test_a_target_that_says_little_settles_nothing():
    right, texts = trained_description(), tiny_texts(count=23)
    report = probe_on(KnowingDrafter(texts, right, right), tiny_target("llama"), texts)
    assert report.fault is None
    assert "23 prompts only" in report.warning


def test_taps_at_the_edge_stay_where_a_shift_would_leave_the_target():
    description = replace(trained_description(), taps=(-1, 2))
    taps = [r.value for r in other_readings(description, 3) if r.factor == "taps"]
    assert taps == [(-1, 1), (0, 2)]
    mixed = replace(description, layers=(LayerAttention(True, 8), LayerAttention(False, None)))
    causal = [r for r in other_readings(mixed, 3) if r.factor == "causal"]
    assert [r.value for r in causal] == ["causal", "bidirectional"]
    assert [layer.window for layer in causal[0].description.layers] == [8, None]


# Scores


def test_scores_are_the_drafters_own_probabilities():
    target = tiny_target("llama")
    drafter, prompt = tiny_drafter(target), (5, 6, 7)
    with torch.inference_mode():
        features = tap_features(target, [OwnText(prompt, (8, 9, 10))], drafter.taps)[0]
        drafter.observe([1], [5], features[:5])
        drafted = drafter.draft([DraftRow(1, (*prompt, 8, 9, 10), drafter.depth)])
        drafter.forget(1)
    ids, log_probs = drafted.token_ids_RDK[0, 0], drafted.log_probs_RDK[0, 0]
    texts = [OwnText(prompt, (8, 9, 10, int(ids[rank]))) for rank in (0, 3)]
    texts.append(OwnText((20, 21), (22, 23)))
    found = score(drafter, texts, tap_features(target, texts, drafter.taps))
    scores = found.by_depth(drafter.description)
    assert len(scores.log_q_AK) == 3 + 2 + 2
    best, fourth = scores.log_q_AK[-2:, 0]  # the engine's have no share for the mask token
    assert best - fourth == pytest.approx(log_probs[0] - log_probs[3], abs=1e-3)
    assert best <= log_probs[0]
    assert np.isnan(scores.log_q_AK[-1, 1]), "beyond the text"


def test_ids_that_a_reduced_vocabulary_lacks_are_left_out():
    texts, right = tiny_texts(2, 3), trained_description()
    drafter = KnowingDrafter(texts, right, right)
    drafter.description = replace(right, target_ids_U=np.arange(texts[0].output_ids[1]))
    features = tap_features(tiny_target("llama"), texts, drafter.taps)
    log_q_AK = score(drafter, texts, features).by_depth(right).log_q_AK
    assert np.isnan(log_q_AK[0, 0])


def test_taps_are_the_outputs_of_layers_and_of_the_embedding():
    module, target = tiny_module("llama"), tiny_target("llama")
    texts = [OwnText((5, 6, 7), (8, 9)), OwnText((20,), (21, 22, 23, 24, 25))]
    found = tap_features(target, texts, (-1, 1))
    for text, features in zip(texts, found, strict=True):
        with torch.no_grad():
            states = module(torch.tensor([text.token_ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[0], states[2]], -1)[0]
        torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-4)


def test_own_text_is_the_engines_until_there_is_enough():
    target = tiny_target("llama")
    prompts = [request.prompt_ids for request in requests(6)]
    texts = own_texts(target, prompts, num_anchors=200)
    assert sum(text.num_anchors for text in texts) >= 200
    wanted = [r for r in requests(6, max_new_tokens=240) if r.prompt_ids in prompts]
    whole = dict(zip(prompts, outputs_of(tiny_engine(), wanted), strict=True))
    for text in texts:
        assert text.output_ids == whole[text.prompt_ids][: len(text.output_ids)]


# Differences


def test_clusters_widen_the_error():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(30), 40)
    alone = rng.normal(0.1, 1.0, 1200)
    shared = alone + rng.normal(0, 1.0, 30)[clusters]
    assert clustered_difference(alone, clusters).standard_error == pytest.approx(0.029, rel=0.3)
    assert clustered_difference(shared, clusters).standard_error == pytest.approx(0.18, rel=0.3)
    assert clustered_difference(alone, clusters).exceeds(0.03, 2.0)
    assert not clustered_difference(alone[:40], clusters[:40]).exceeds(0.0, 3.0), "one text only"


def test_a_difference_of_nothing_is_seldom_found():
    """Of 3,000 draws of 48 texts about 0.2 % exceed three errors; ten times that are not seen."""
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(48), 5)
    found = 0
    for _ in range(3000):
        noise = rng.normal(0, 1, 240) + rng.normal(0, 1, 48)[clusters]
        found += clustered_difference(noise, clusters).exceeds(0.0, NUM_ERRORS)
    assert found <= 30


# What is kept


def report(**fields) -> ProbeReport:
    return ProbeReport(num_texts=48, num_anchors=2400, log_q=-3.0, agreements=(0.5, 0.4), **fields)


def test_the_first_verdict_stays(tmp_path):
    assert load_report(KEY, tmp_path) is None
    assert save_report(KEY, report(seconds=1.0), tmp_path).seconds == 1.0
    assert save_report(KEY, report(seconds=2.0), tmp_path).seconds == 1.0
    assert load_report(KEY, tmp_path) == report(seconds=1.0)
    assert load_report(probe_key("target", "other", trained_description()), tmp_path) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"taps": (1, 2)},
        {"first_prediction_slot": 0},
        {"layers": (LayerAttention(True, None), LayerAttention(False, None))},
        {"layers": (LayerAttention(False, 8), LayerAttention(False, None))},
    ],
)
def test_a_reader_that_makes_something_else_of_the_files_is_judged_anew(tmp_path, fields):
    save_report(KEY, report(fault="read otherwise"), tmp_path)
    now = probe_key("target", "drafter", trained_description(**fields))
    assert load_report(now, tmp_path) is None
    assert load_report(KEY, tmp_path).fault == "read otherwise"


def test_any_number_may_save_at_the_same_time_and_hold_with_one_verdict(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        kept = list(
            pool.map(lambda n: save_report(KEY, report(seconds=float(n)), tmp_path), range(40))
        )
    assert len({r.seconds for r in kept}) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_report_survives_its_file():
    right = trained_description()
    full = judged(replace(right, taps=(1, 2)), right)
    again = ProbeReport.of_dict(json.loads(json.dumps(full.to_dict())))
    assert again.fault == full.fault
    assert right.name not in full.fault, "a path of one machine says nothing on another"
    assert again.readings[0].difference == full.readings[0].difference


@pytest.mark.parametrize("content", ["", "[]", '{"key": 1}'])
def test_a_damaged_report_is_made_again(tmp_path, caplog, content):
    save_report(KEY, report(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert load_report(KEY, tmp_path) is None
    assert "is ignored" in caplog.text
    save_report(KEY, report(seconds=3.0), tmp_path)
    assert load_report(KEY, tmp_path) == report(seconds=3.0)


class NeverScored(KnowingDrafter):
    def block_logits(self, rows, num_slots=None):
        raise AssertionError("the verdict is known")


def test_a_known_fault_refuses_at_once_and_a_known_pass_lets_go(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path))
    right = trained_description()
    drafter = NeverScored([], right, right)
    save_report(KEY, report(fault="read otherwise"))
    with pytest.raises(ModelError, match=f"^{right.name}: read otherwise"):
        require_right_reading(drafter, tiny_target("llama"), None, KEY)
    passed = probe_key("a", "b", right)
    save_report(passed, report())
    found = require_right_reading(drafter, tiny_target("llama"), None, passed)
    assert found == report()
    assert profiles_dir() == tmp_path


def test_a_probe_is_announced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path))
    right = trained_description()
    drafter = KnowingDrafter(tiny_texts(96), right, right)

    def tokenizer(text):
        return {"input_ids": [2 + ord(letter) % 90 for letter in text[:4]]}

    with caplog.at_level(logging.INFO):
        require_right_reading(drafter, tiny_target("llama"), tokenizer, KEY)
    assert f"{right.name} is probed on the target's answers to 96 prompts" in caplog.text


def test_an_engine_is_refused_a_misread_drafter_unless_the_probe_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path))
    target, drafter = resolve_target(SMOLLM2), resolve_drafter("default", SMOLLM2)
    reading = describe_directory(drafter.path)
    save_report(probe_key(target.digest, drafter.digest, reading), report(fault="read otherwise"))
    with pytest.raises(ModelError, match="read otherwise"):
        Engine.from_pretrained(SMOLLM2, dtype="bfloat16")


# The job's switch, prompts and vocabularies


def test_off_needs_no_quotes():
    job = {
        "input": {"path": "a.jsonl", "prompt": "p"},
        "output": {"path": "out", **yaml.safe_load("steps: off")},
        "model": {"target": "x", **yaml.safe_load("probe: off")},
    }
    parsed = parse_job(job)
    assert parsed.model.probe == "off"
    assert parsed.output.steps == "off"
    assert "model.probe" not in parsed.identity_fields()
    with pytest.raises(JobFileError, match=r"model\.probe"):
        parse_job({**job, "model": {"target": "x", "probe": "sometimes"}})


def test_prompts_are_many_and_asked_as_a_user_would():
    tokenizer = load_tokenizer(resolve_target(SMOLLM2).path)
    prompts = probe_prompts(tokenizer)
    assert len(set(prompts)) == len(prompts) >= 24
    assert 29 * len(prompts) > NUM_ANCHORS
    assert tokenizer.decode(prompts[0]).count("<|im_start|>user") == 1


def write_tokenizer(path: Path, vocabulary, added=()) -> Path:
    path.mkdir()
    content = {"model": {"vocab": vocabulary}, "added_tokens": list(added)}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path):
    target = write_tokenizer(tmp_path / "target", {"a": 0, "b": 1}, [{"content": "<x>", "id": 2}])
    same = write_tokenizer(tmp_path / "same", [["a", 0.0], ["b", -1.0]])
    require_same_vocabulary(same, target)
    require_same_vocabulary(tmp_path, target)
    moved = write_tokenizer(tmp_path / "moved", {"a": 0, "b": 1}, [{"content": "<x>", "id": 7}])
    with pytest.raises(ModelError, match="token '<x>' is 7 in it and 2"):
        require_same_vocabulary(moved, target)
    foreign = write_tokenizer(tmp_path / "foreign", {"c": 0})
    with pytest.raises(ModelError, match="shares no token"):
        require_same_vocabulary(foreign, target)


# The built-in drafter


def test_the_built_in_drafter_is_read_right():
    """Each other reading is worse beyond doubt: differences change their sign with the readings,
    so a file that described any of them would be caught."""
    target = smollm2_target()
    found = probe_on(smollm2_drafter(target), target, reference_texts(20))
    assert found.fault is None
    for reading in found.readings:
        assert reading.difference < -LEAST_DIFFERENCE, reading
        assert reading.difference < -NUM_ERRORS * reading.standard_error, reading


@pytest.mark.slow
@pytest.mark.parametrize("run", range(20))
def test_misdescribed_copies_are_caught_whatever_the_prompts(run, tmp_path):
    """Files with the taps a layer late, the first slot of another family, and a causal block."""
    misdescribed(run, tmp_path)
