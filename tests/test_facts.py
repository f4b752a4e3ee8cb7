"""What is told of a row before it starts, and what is not."""

import json

from bastion_batch.cluster.facts import facts_of
from bastion_batch.core.lengths import NO_GROUP


def chat(system, text):
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def test_rows_that_begin_alike_are_of_one_task():
    texts = [f"Translate this sentence please: {i}" for i in range(5)]
    texts += [f"Sum up the story of {i}" for i in range(5)] + ["Hello", "", None]
    groups_N, sizes_N, limits_N = facts_of(texts, 64, are_chats=False)
    assert len(set(groups_N[:5].tolist())) == len(set(groups_N[5:10].tolist())) == 1
    assert groups_N[0] != groups_N[5]
    assert groups_N[10:].tolist() == [NO_GROUP] * 3, "too rare to be a task"
    assert sizes_N.tolist() == [float(len(text or "x") or 1) for text in texts]
    assert set(limits_N.tolist()) == {64}


def test_the_task_of_a_chat_is_its_system_message():
    chats = [chat("You translate.", f"{i} words") for i in range(4)]
    chats += [chat("You count.", f"{i} words") for i in range(4)]
    as_lists = facts_of(chats, 64, are_chats=True)
    as_text = facts_of([json.dumps(one) for one in chats], 64, are_chats=True)
    assert as_lists.groups_N.tolist() == as_text.groups_N.tolist()
    assert len(set(as_lists.groups_N.tolist())) == 2
    assert as_lists.sizes_N[0] == len("You translate.0 words")


def test_what_is_no_chat_is_of_no_task():
    broken = [None, "[", "3", [{"role": 1}], {"role": "user"}, [7]]
    facts = facts_of(broken, 64, are_chats=True)
    assert facts.sizes_N.tolist() == [1.0] * 6
    assert facts.groups_N.tolist() == [NO_GROUP] * 6


def test_nothing_of_a_prompt_is_told_but_a_hash_and_a_size():
    facts = facts_of(["my secret is 42"] * 3, 64, are_chats=False)
    assert "secret" not in repr(facts)
