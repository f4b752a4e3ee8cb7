"""Ways to read a drafter's checkpoint, and how well each predicts the target's own text.

The same tensors run under any description of their sizes. Three facts that a file may state
wrongly, or a packaging leave to be guessed, change nothing about the sizes: which layers are
tapped, which slot predicts first, and whether a block is causal. Under a wrong one everything
runs and hardly anything is accepted; the likelihood of text shows which one is right.

Shape letters: A anchors, R rows of a pass, W first slots of a block, O the two positions that a slot
may predict, K depths compared, V vocabulary, U draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.engine.drafters import Drafter, DraftRow
from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.own_text import OwnText
from bastion_batch.engine.transfer import to_device

Factor = Literal["taps", "first_prediction_slot", "causal"]
"""What a reading changes: see `DrafterDescription`."""

MAX_DEPTHS = 2
"""K at most: deeper slots are little likely under any reading and add more noise than evidence."""


class ReadableDrafter(Drafter, Protocol):
    """A drafter that can be read in several ways."""

    description: DrafterDescription

    def reread(self, description: DrafterDescription) -> Self:
        """The same weights under another description of the same sizes, with empty caches."""
        ...

    def block_logits(self, rows: Sequence[DraftRow], num_slots: int | None = None) -> Tensor:
        """Logits `[R, W, U]` of the first slots of rows' blocks, before conditional heads."""
        ...


class Reading(NamedTuple):
    """A description that differs from the checkpoint's own in one factor."""

    factor: Factor
    value: tuple[int, ...] | int | str
    """What it changes the factor to."""
    description: DrafterDescription


def other_readings(description: DrafterDescription, num_target_layers: int) -> Iterator[Reading]:
    """Every other way in which one factor could be read.

    A tap that a shift would move off the target stays where it is.
    """
    for shift in (-1, 1):
        taps = tuple(min(max(tap + shift, -1), num_target_layers - 1) for tap in description.taps)
        if taps != description.taps:
            yield Reading("taps", taps, replace(description, taps=taps))
    if description.block_width > 1:
        slot = 1 - description.first_prediction_slot
        num_predictions = min(description.num_predictions, description.block_width - slot)
        other = replace(description, first_prediction_slot=slot, num_predictions=num_predictions)
        yield Reading("first_prediction_slot", slot, other)
        for causal in (True, False):
            layers = tuple(layer._replace(causal=causal) for layer in description.layers)
            if layers != description.layers:
                value = "causal" if causal else "bidirectional"
                yield Reading("causal", value, replace(description, layers=layers))


class SlotScores(NamedTuple):
    """What a reading gives the tokens near each anchor, in its first slots."""

    log_q_AWO: NDArray[np.float64]
    """Of the token at the slot's own position (O = 0) and of the one after it (O = 1); NaN beyond
    the text's end, and for a token that a reduced vocabulary lacks."""
    is_best_AWO: NDArray[np.bool_]
    """Whether that token is the slot's most probable one."""

    def by_depth(self, description: DrafterDescription) -> "DepthScores":
        """The entries that belong to depths 1, 2, ... under a description of the same pass."""
        first = description.first_prediction_slot
        slots = slice(first, first + min(description.depth, MAX_DEPTHS))
        return DepthScores(
            self.log_q_AWO[:, slots, 1 - first], self.is_best_AWO[:, slots, 1 - first]
        )


class DepthScores(NamedTuple):
    """Of the target's tokens at depths 1, 2, ..."""

    log_q_AK: NDArray[np.float64]
    is_best_AK: NDArray[np.bool_]


@torch.inference_mode()
def score(
    drafter: ReadableDrafter, texts: Sequence[OwnText], features: Sequence[Tensor]
) -> SlotScores:
    """Score all texts: one draft pass for the first anchors of all, one for the second, and so on.

    Anchors come in that order: see `anchor_texts`. The drafter's caches are left as empty as they
    were.

    Args:
        drafter: under the reading that is scored.
        texts: each with an anchor at least.
        features: of each text, as the drafter's taps.
    """
    parts = []
    for number in range(max(text.num_anchors for text in texts)):
        live = [place for place, text in enumerate(texts) if text.num_anchors > number]
        for place in range(len(texts)):
            if texts[place].num_anchors == number:
                drafter.forget(place)
        _observe(drafter, texts, features, live, number)
        rows = [_row(drafter, place, texts[place], number) for place in live]
        parts.append(_score_pass(drafter, rows, [texts[place] for place in live]))
    for place in range(len(texts)):
        drafter.forget(place)
    return SlotScores(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def anchor_texts(texts: Sequence[OwnText]) -> NDArray[np.int64]:
    """The text that every anchor of `score` lies in, `[A]`."""
    counts = np.array([text.num_anchors for text in texts])
    return np.concatenate([np.flatnonzero(counts > number) for number in range(counts.max())])


def _observe(
    drafter: ReadableDrafter,
    texts: Sequence[OwnText],
    features: Sequence[Tensor],
    live: Sequence[int],
    number: int,
) -> None:
    """Make context of what lies before an anchor: the prompt, then a token at a time."""
    stops = [len(texts[place].prompt_ids) + number for place in live]
    starts = [0 if number == 0 else stop - 1 for stop in stops]
    new = [features[p][a:b] for p, a, b in zip(live, starts, stops, strict=True)]
    drafter.observe(live, [len(part) for part in new], torch.cat(new))


def _row(drafter: ReadableDrafter, place: int, text: OwnText, number: int) -> DraftRow:
    known = text.token_ids[: len(text.prompt_ids) + number + 1]
    return DraftRow(place, known, drafter.depth)


def _score_pass(
    drafter: ReadableDrafter, rows: Sequence[DraftRow], texts: Sequence[OwnText]
) -> SlotScores:
    """Score one anchor of each row."""
    logits_RWU = drafter.block_logits(rows, MAX_DEPTHS + 1)
    width = logits_RWU.shape[1]
    following = np.full((len(rows), width + 1), -1)
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        tail = text.token_ids[len(row.token_ids) - 1 :][: width + 1]
        following[number, : len(tail)] = tail
    at_WO = np.arange(width)[:, None] + np.arange(2)
    return _look_up(logits_RWU, _draft_ids(following[:, at_WO], drafter.description))


def _look_up(logits_RWU: Tensor, draft_ids_RWO: NDArray[np.int64]) -> SlotScores:
    """Scores of some draft ids of every slot; of none where the id is -1."""
    index = to_device(np.maximum(draft_ids_RWO, 0), logits_RWU.device)
    log_q, best = [], []
    for logits_WU, index_WO in zip(logits_RWU, index, strict=True):
        logits = logits_WU.float()  # a row's slots at a time stay in a processor's cache
        wanted = logits.gather(1, index_WO)
        log_q.append(wanted - logits.logsumexp(1, keepdim=True))
        best.append(wanted == logits.amax(1, keepdim=True))
    log_q_RWO = torch.stack(log_q).double().cpu().numpy()
    log_q_RWO[draft_ids_RWO < 0] = np.nan
    return SlotScores(log_q_RWO, torch.stack(best).cpu().numpy() & (draft_ids_RWO >= 0))


def _draft_ids(target_ids: NDArray[np.int64], description: DrafterDescription) -> NDArray[np.int64]:
    """Draft ids of target ids; -1 where there is none."""
    if description.target_ids_U is None:
        return target_ids
    draft_ids_V = np.full(description.vocab_size, -1)
    draft_ids_V[description.target_ids_U] = np.arange(len(description.target_ids_U))
    return np.where(target_ids < 0, -1, draft_ids_V[target_ids])
