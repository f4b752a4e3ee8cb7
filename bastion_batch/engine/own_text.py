"""The target's own greedy text, and its taps: what a drafter is held against.

Shape letters: S tokens, F features of a token (T taps of E values each).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.core.latency import LatencyModel
from bastion_batch.engine.attention import AttentionPlan, PassRow, pass_order
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.device import device_speed
from bastion_batch.engine.engine import Engine
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device
from bastion_batch.records import Completion, Request, SamplingParams

TOKEN_LIMITS = (30, 60, 120, 240)
"""Tokens that a prompt is answered with, in rounds until there is enough text: many short texts
say more than few long ones."""
PASS_TOKENS = 2048
"""Tokens of a pass that reads texts, but one text at least."""


class OwnText(NamedTuple):
    """A prompt and how the target goes on."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt_ids + self.output_ids

    @property
    def num_anchors(self) -> int:
        """Output tokens that are followed by another one."""
        return max(0, len(self.output_ids) - 1)


def own_texts(
    target: Target, prompts: Sequence[tuple[int, ...]], *, num_anchors: int
) -> list[OwnText]:
    """What the target says to some prompts: to each up to its end, or until there is enough.

    Texts have so many anchors together unless all of them end before. Those without any are left
    out, as are prompts that leave no room in the target's context.
    """
    speed = device_speed(target.device, target.dtype)
    costs = StepCosts(LatencyModel(target.shape, speed), None)
    engine = Engine(target, costs=costs, max_batch=len(prompts))
    fitting = [ids for ids in prompts if len(ids) + TOKEN_LIMITS[0] < engine.max_context]
    texts = dict(enumerate(OwnText(ids, ()) for ids in fitting))
    unfinished = set(texts)
    for limit in TOKEN_LIMITS:
        for completion in _continue(engine, {n: texts[n] for n in unfinished}, limit):
            number = int(completion.row_id)
            texts[number] = texts[number]._replace(output_ids=completion.output_ids)
            if completion.finish_reason != "length":
                unfinished.remove(number)
        if not unfinished or sum(text.num_anchors for text in texts.values()) >= num_anchors:
            break
    return [text for text in texts.values() if text.num_anchors]


def _continue(engine: Engine, texts: dict[int, OwnText], limit: int) -> Iterator[Completion]:
    """Decode some texts up to so many output tokens."""
    request = Request(row_id="", prompt_ids=(), sampling=SamplingParams(max_new_tokens=limit))
    return engine.generate(
        replace(request, row_id=str(n), prompt_ids=t.prompt_ids, generated_ids=t.output_ids)
        for n, t in texts.items()
    )


class TextReading(NamedTuple):
    """What the target makes of a text's tokens."""

    taps_SF: Tensor
    hidden_SE: Tensor
    """What its head scores."""


def tap_features(target: Target, texts: Sequence[OwnText], taps: tuple[int, ...]) -> list[Tensor]:
    """The taps of every token of each text, `[S, F]`, all of them from the same passes."""
    return [reading.taps_SF for reading in read_texts(target, texts, taps)]


@torch.inference_mode()
def read_texts(
    target: Target, texts: Sequence[OwnText], taps: tuple[int, ...]
) -> list[TextReading]:
    """The target's passes over whole texts."""
    readings: list[TextReading] = []
    for group in _passes(texts):
        readings += _read(target, [text.token_ids for text in group], taps)
    return readings


def _read(
    target: Target, texts: Sequence[tuple[int, ...]], taps: tuple[int, ...]
) -> list[TextReading]:
    """One pass."""
    cache = target.new_cache()
    slots = [cache.open(len(text)) for text in texts]
    order = pass_order(slots, [True] * len(texts))
    rows = [PassRow(slots[place], len(texts[place]), None) for place in order]
    token_ids = np.concatenate([texts[place] for place in order])
    positions = np.concatenate([np.arange(row.num_tokens) for row in rows])
    out = target.forward(
        to_device(token_ids, target.device),
        to_device(positions, target.device),
        int(positions.max()),
        AttentionPlan(cache, rows, target.stack.config.num_q_heads),
        taps,
    )
    assert out.taps_SF is not None
    sizes = [row.num_tokens for row in rows]
    parts = list(map(TextReading, out.taps_SF.split(sizes), out.hidden_SE.split(sizes)))
    return [parts[place] for place in np.argsort(order)]


def _passes(texts: Sequence[OwnText]) -> Iterator[list[OwnText]]:
    """The texts in order, in groups of about `PASS_TOKENS` tokens."""
    group: list[OwnText] = []
    for text in texts:
        if group and sum(len(t.token_ids) for t in (*group, text)) > PASS_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
