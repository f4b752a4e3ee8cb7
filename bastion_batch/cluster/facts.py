"""What tells of a row's length before it starts: its task, as far as that shows, and its size.

Rows of one task mostly begin alike: with the same system message, or the same first words. Rows
whose beginning is rare in their unit are of no task. The prompts themselves go nowhere: what
leaves this module is a hash and a number for each row.
"""

import json
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from bastion_batch.core.lengths import NO_GROUP, FactColumns

NUM_WORDS = 4
"""First words of a prompt that may tell its task."""
NUM_CHARACTERS = 200
"""Of a prompt that are looked at for these words."""
MIN_TASK_ROWS = 3
MIN_TASK_SHARE = 1 / 64
"""Rows of a unit that must begin alike to be of one task."""


def facts_of(prompts: Sequence[object], max_new_tokens: int, *, are_chats: bool) -> FactColumns:
    """The facts of N rows.

    Args:
        prompts: of one unit, as the input has them: texts, or chats as lists or as JSON text.
        max_new_tokens: of each row.
        are_chats: whether they are chats.
    """
    chats = [_chat(prompt) if are_chats else [_user(prompt)] for prompt in prompts]
    sizes = [max(1, sum(len(content) for _, content in chat)) for chat in chats]
    beginnings = [_beginning(chat) for chat in chats]
    counts = Counter(beginnings)
    enough = max(MIN_TASK_ROWS, MIN_TASK_SHARE * len(chats))
    groups = [
        crc32(b.encode(errors="replace")) if b and counts[b] >= enough else NO_GROUP
        for b in beginnings
    ]
    return FactColumns(
        np.array(groups, np.int64),
        np.array(sizes, np.float64),
        np.full(len(chats), max_new_tokens, np.int64),
    )


_Chat = list[tuple[str, str]]
"""Role and content of each message."""


def _user(prompt: object) -> tuple[str, str]:
    return "user", prompt if isinstance(prompt, str) else ""


def _chat(value: object) -> _Chat:
    """A chat's messages; what is not a chat has none, and is an error row elsewhere."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    messages = value if isinstance(value, list) else []
    fields = ((m.get("role"), m.get("content")) for m in messages if isinstance(m, dict))
    return [
        (role, text) for role, text in fields if isinstance(role, str) and isinstance(text, str)
    ]


def _beginning(chat: _Chat) -> str:
    """What rows of one task have in common: the system message, else the first words."""
    role, content = chat[0] if chat else ("", "")
    return content if role == "system" else " ".join(content[:NUM_CHARACTERS].split()[:NUM_WORDS])
