"""The built-in pair of models, texts of the target, and misdescribed copies of the drafter."""

import gzip
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copyfile

import torch

from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.own_text import OwnText, own_texts
from bastion_batch.engine.probe import NUM_ANCHORS, as_asked, probe_on
from bastion_batch.engine.target import Target

SMOLLM2 = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "tests" / "data" / "smollm2-greedy-256.json.gz"

QUESTIONS = (
    "Explain {} to a child.", "What should I know about {}?", "Write a short story about {}.",
    "List five facts about {}.", "Write a poem about {}.", "Why is {} important?",
    "Write a letter about {} to a friend.", "How would you describe {} in three sentences?",
    "Write a Python function that prints a sentence about {}.", "Compare {} with something similar.",
    "Write a dialogue about {}.", "Give three arguments for and against {}.",
    "Summarise the history of {}.", "Make up a riddle about {}.", "Plan a lesson about {}.",
    "What do people get wrong about {}?",
)  # fmt: skip
SUBJECTS = (
    "bridges", "winter", "trains", "bread", "whales", "chess", "gardens", "radio", "mountains",
    "paper", "volcanoes", "tea", "bicycles", "the moon", "libraries", "glass", "football", "rivers",
    "clocks", "music", "deserts", "salt", "markets", "robots", "painting", "forests", "money",
    "islands", "dreams", "maps", "horses", "electricity", "friendship", "lighthouses", "wool",
    "theatre", "storms", "cooking", "dogs", "castles", "numbers", "the sea", "schools", "gold",
    "sleep", "honey", "ships", "poetry", "snow", "telephones", "birds", "spices", "cities",
    "running", "stars", "soap", "kites", "letters", "apples", "museums",
)  # fmt: skip


@cache
def smollm2_target() -> Target:
    path = resolve_target(SMOLLM2).path
    return Target.load(path, torch.bfloat16, torch.device("cpu"))


def smollm2_drafter(target: Target, path: Path | None = None) -> DFlashDrafter:
    return load_drafter(path or resolve_drafter("default", SMOLLM2).path, target)


def reference_texts(num_tokens: int) -> list[OwnText]:
    """The target's recorded answers to the quickstart's first prompts, cut."""
    tokenizer = load_tokenizer(resolve_target(SMOLLM2).path)
    lines = (ROOT / "jobs" / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = json.loads(gzip.decompress(REFERENCE.read_bytes()))
    texts = [
        OwnText(as_asked(tokenizer, json.loads(line)["prompt"]), tuple(output[:num_tokens]))
        for line, output in zip(lines, outputs, strict=False)
    ]
    return [text for text in texts if text.num_anchors and len(text.prompt_ids) < 200]


def prompts_of_run(run: int, count: int = 96) -> list[tuple[int, ...]]:
    """Prompts that no two of ten runs share, nor the probe."""
    every = [q.format(s) for q in QUESTIONS for s in SUBJECTS]
    random.Random(run // 10).shuffle(every)
    tokenizer = load_tokenizer(resolve_target(SMOLLM2).path)
    first = (run % 10) * count
    return [as_asked(tokenizer, text) for text in every[first : first + count]]


def misdescribed(run: int, directory: Path) -> None:
    """Probe the drafter and three wrong copies on the prompts of a run."""
    target = smollm2_target()
    texts = own_texts(target, prompts_of_run(run), num_anchors=NUM_ANCHORS)
    right = smollm2_drafter(target)
    assert probe_on(right, target, texts).fault is None
    late = _copy(directory / "late", shift=1)
    taps = probe_on(smollm2_drafter(target, late), target, texts)
    assert taps.fault is not None, taps
    assert f"and {list(right.taps)} fits better" in taps.fault
    causal = _copy(directory / "causal", is_causal=True)
    flipped = probe_on(smollm2_drafter(target, causal), target, texts)
    assert flipped.fault is not None, flipped
    assert "and bidirectional fits better" in flipped.fault
    slot = replace(right.description, first_prediction_slot=0, num_predictions=right.depth)
    shifted = probe_on(right.reread(slot), target, texts)
    assert shifted.fault is not None, shifted
    assert "and 1 fits better" in shifted.fault


def _copy(directory: Path, shift: int = 0, **fields) -> Path:
    source = resolve_drafter("default", SMOLLM2).path
    directory.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | fields
    nested = config["dflash_config"]
    nested["target_layer_ids"] = [tap + shift for tap in nested["target_layer_ids"]]
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    copyfile(source / "model.safetensors", directory / "model.safetensors")
    return directory
