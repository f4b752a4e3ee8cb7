"""Prompts from templates: varied, the same for the same seed, and two sets that share nothing."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from bastion_batch.training.prompts import Grammar
from bastion_batch.training.prompts.grammar import Kind

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def training():
    return list(islice(Grammar.built_in("training").prompts(1), 8000))


def test_there_are_thousands_of_distinct_prompts_of_many_kinds(training):
    assert len({prompt.prompt for prompt in training}) == 8000
    assert len({prompt.id for prompt in training}) == 8000
    kinds = Counter(prompt.kind for prompt in training)
    wanted = {"explanation", "maths", "code", "dialogue", "summary", "german", "chinese"}
    assert wanted <= kinds.keys()
    assert max(kinds.values()) < 0.25 * len(training)


def test_no_field_of_a_template_is_left_over(training):
    assert not [prompt for prompt in training if ".." in prompt.prompt.replace("...", "")]
    assert not [prompt for prompt in training if "{name" in prompt.prompt]


def test_a_seed_gives_the_same_prompts_and_another_one_others(training):
    grammar = Grammar.built_in("training")
    assert list(islice(grammar.prompts(1), 100)) == training[:100]
    assert {p.prompt for p in islice(grammar.prompts(2), 100)} - {p.prompt for p in training[:100]}


def test_held_out_prompts_come_from_other_templates_and_subjects(training):
    held_out, train = Grammar.built_in("held_out"), Grammar.built_in("training")
    templates = {t for kind in train.kinds.values() for t in kind.templates}
    assert not templates & {t for kind in held_out.kinds.values() for t in kind.templates}
    values = {value for values in train.slots.values() for value in values}
    assert not values & {value for values in held_out.slots.values() for value in values}
    texts = {prompt.prompt for prompt in training}
    assert not texts & {p.prompt for p in islice(held_out.prompts(1), 200)}


@pytest.mark.parametrize("path", ["jobs/data/prompts.jsonl", "benchmarks/prompts.jsonl"])
def test_what_the_drafter_is_measured_on_is_not_what_it_was_trained_on(training, path):
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    measured = {json.loads(line)["prompt"] for line in lines}
    second = islice(Grammar.built_in("training").prompts(2), 16_500)
    assert not measured & {prompt.prompt for prompt in (*training, *second)}


def test_a_slot_is_drawn_once_and_a_second_draw_differs():
    grammar = Grammar(
        {"a": ("x", "y"), "b": ("{a}!",)},
        {"k": Kind(1, ("{a} {a} {a#2} {b} {{n}} {3..4}",))},
    )
    prompts = {prompt.prompt for prompt in grammar.prompts(0)}
    assert prompts == {f"{a} {a} {b} {a}! {{n}} {n}" for a, b in ("xy", "yx") for n in (3, 4)}


@pytest.mark.parametrize("values", [("x",), ("x", "y")])
def test_more_different_draws_than_a_slot_has_are_refused(values):
    template = "{a}" + "".join(f"{{a#{n}}}" for n in range(2, len(values) + 2))
    with pytest.raises(ValueError, match=f"slot 'a' has {len(values)} different values"):
        next(Grammar({"a": values}, {"k": Kind(1, (template,))}).prompts(0))
