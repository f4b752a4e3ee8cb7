"""The load-time probe: whether a drafter's checkpoint is read as it was trained.

A wrong reading loads, runs and loses nothing but speed: hardly a draft is accepted. Counting
agreements does not find it, since a tap shift of one layer costs a point or two; the likelihood of
the target's own greedy text does. Every other reading (`readings`) is scored on the same anchors,
and one that beats the checkpoint's own beyond doubt stops the load with a diagnosis.

What is compared is the mean over anchors of the difference in log q of the target's token,
averaged over the first slots; differences are clipped, so that no token decides alone, and their
standard error is that of texts, not of tokens. Where even the best reading knows nothing of the
text there is nothing to tell readings apart by, and the drafter only gets a warning.

Shape letters: A anchors, K depths.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bastion_batch.core.paired import Difference, clustered_difference
from bastion_batch.engine.model_cache import one_at_a_time
from bastion_batch.engine.own_text import OwnText, own_texts, tap_features
from bastion_batch.engine.probe_report import (
    ProbeKey,
    ProbeReport,
    ReadingReport,
    load_report,
    lock_of,
    save_report,
)
from bastion_batch.engine.readings import (
    DepthScores,
    ReadableDrafter,
    Reading,
    SlotScores,
    anchor_texts,
    other_readings,
    score,
)
from bastion_batch.engine.target import Target
from bastion_batch.errors import ModelError

NUM_ANCHORS = 2_500
"""Wanted;"""
MIN_ANCHORS = 2_000
"""fewer are worth a warning."""
MIN_TEXTS = 24
"""Fewer say too little of the differences between texts."""
CLIP = 2.0
"""Nats at which the difference of one slot is cut, either way."""
LEAST_DIFFERENCE = 0.03
"""Nats by which another reading must be better,"""
NUM_ERRORS = 3.0
"""and standard errors."""
LOW_AGREEMENT = 0.25
"""Slots for the next token that agree with the target less often than this are worth a warning."""

logger = logging.getLogger(__name__)


def require_right_reading(
    drafter: ReadableDrafter,
    target: Target,
    tokenizer: Any,  # noqa: ANN401 - a transformers one
    key: ProbeKey,
) -> ProbeReport:
    """The verdict on a drafter, from an earlier probe of the same files or from one made now.

    Where several processes of a machine load the same pair, one of them probes.

    Args:
        drafter: as its checkpoint describes it.
        target: what it drafts for.
        tokenizer: the target's.
        key: of the pair: see `probe_key`.

    Raises:
        ModelError: another reading of the checkpoint is better beyond doubt.
    """
    name = drafter.description.name
    with _one_probe(key):
        report = load_report(key)
        if report is None:
            prompts = probe_prompts(tokenizer)
            logger.info("%s is probed on the target's answers to %d prompts", name, len(prompts))
            report = save_report(key, probe(drafter, target, prompts))
            logger.info("the probe of the drafter took %.1f s", report.seconds)
    if report.fault is not None:
        raise ModelError(f"{name}: {report.fault}")
    if report.warning is not None:
        logger.warning("%s: %s", name, report.warning)
    return report


@contextmanager
def _one_probe(key: ProbeKey) -> Iterator[None]:
    """Wait for another process that probes this pair, where files can be locked."""
    lock = lock_of(key)
    with ExitStack() as held:
        try:
            held.enter_context(one_at_a_time(lock))
        except OSError as error:
            logger.warning("%s cannot be locked: %s", lock, error)
        yield


def probe(
    drafter: ReadableDrafter, target: Target, prompts: Sequence[tuple[int, ...]]
) -> ProbeReport:
    """Score every reading of a drafter on what its target says to some prompts."""
    start = time.perf_counter()
    texts = own_texts(target, prompts, num_anchors=NUM_ANCHORS)
    report = probe_on(drafter, target, texts)
    return report._replace(seconds=round(time.perf_counter() - start, 2))


def probe_on(drafter: ReadableDrafter, target: Target, texts: Sequence[OwnText]) -> ProbeReport:
    """Score every reading of a drafter on texts of its target."""
    start = time.perf_counter()
    if len(texts) < MIN_TEXTS:
        message = f"the target says something to {len(texts)} prompts only; {MIN_TEXTS} are needed"
        return ProbeReport.of_nothing(message, num_texts=len(texts))
    own = Reading("taps", drafter.taps, drafter.description)
    others = list(other_readings(drafter.description, target.stack.config.num_layers))
    taps = tuple(sorted({tap for r in (own, *others) for tap in r.description.taps}))
    features = tap_features(target, texts, taps)

    def scored(reading: Reading) -> SlotScores:
        wanted = _columns(taps, reading.description.taps, target.stack.config.hidden_size)
        parts = [part[:, wanted] for part in features]
        return score(drafter.reread(reading.description), texts, parts)

    own_scores = scored(own)
    base = own_scores.by_depth(own.description)
    compared = []
    for reading in others:
        same_pass = reading.factor == "first_prediction_slot"
        scores = own_scores if same_pass else scored(reading)
        compared.append((reading, scores.by_depth(reading.description)))
    return _judge(drafter, texts, base, compared)._replace(
        seconds=round(time.perf_counter() - start, 2)
    )


def probe_prompts(tokenizer: Any) -> list[tuple[int, ...]]:  # noqa: ANN401 - a transformers one
    """The prompts that come with the package, as the target is asked them."""
    file = resources.files("bastion_batch") / "data" / "probe_prompts.txt"
    return [as_asked(tokenizer, line) for line in file.read_text(encoding="utf-8").splitlines()]


def as_asked(tokenizer: Any, text: str) -> tuple[int, ...]:  # noqa: ANN401
    """A prompt's tokens: a user's message where the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return tuple(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _columns(taps: tuple[int, ...], wanted: tuple[int, ...], size: int) -> Tensor:
    """Where the features of some taps lie among those of all, `size` values each."""
    return torch.cat([torch.arange(size) + taps.index(tap) * size for tap in wanted])


def difference(own: DepthScores, other: DepthScores, texts_A: NDArray[np.integer]) -> Difference:
    """By how much another reading is better than a drafter's own, at the depths that both have."""
    num_depths = min(own.log_q_AK.shape[1], other.log_q_AK.shape[1])
    differences_AK = other.log_q_AK[:, :num_depths] - own.log_q_AK[:, :num_depths]
    known_A = ~np.isnan(differences_AK).all(1)
    clipped_AK = np.clip(differences_AK[known_A], -CLIP, CLIP)
    return clustered_difference(np.nanmean(clipped_AK, 1), texts_A[known_A])


def _judge(
    drafter: ReadableDrafter,
    texts: Sequence[OwnText],
    own: DepthScores,
    others: Sequence[tuple[Reading, DepthScores]],
) -> ProbeReport:
    texts_A = anchor_texts(texts)
    compared = [
        ReadingReport(
            factor=reading.factor,
            value=reading.value,
            difference=round(gain.mean, 4),
            standard_error=round(gain.standard_error, 4),
            agreement=round(float(scores.is_best_AK[:, 0].mean()), 4),
            is_better=gain.exceeds(LEAST_DIFFERENCE, NUM_ERRORS),
        )
        for reading, scores in others
        for gain in [difference(own, scores, texts_A)]
    ]
    agreements = own.is_best_AK.mean(0)
    report = ProbeReport(
        num_texts=len(texts),
        num_anchors=len(texts_A),
        log_q=round(float(np.nanmean(own.log_q_AK)), 4),
        agreements=tuple(round(float(value), 4) for value in agreements),
        readings=tuple(compared),
    )
    better = max((r for r in compared if r.is_better), key=lambda r: r.difference, default=None)
    least = _commonest_share(texts)
    if max([agreements[0], *(r.agreement for r in compared)]) <= least:
        return report._replace(
            warning="under no reading does it name the target's next token more often than always "
            f"naming the commonest one would ({least:.3f}): it knows nothing of this target"
        )
    if better is not None:
        return report._replace(fault=diagnosis(drafter, better, len(texts_A), len(texts)))
    return report._replace(warning=_doubt(agreements[0], len(texts_A)))


def _doubt(agreement: float, num_anchors: int) -> str | None:
    """What is worth a warning although no other reading is better."""
    if num_anchors < MIN_ANCHORS:
        return f"the target's text has {num_anchors} anchors only; {MIN_ANCHORS} are wanted"
    if agreement < LOW_AGREEMENT:
        return (
            f"its first slot agrees with the target in {agreement:.3f} of the anchors, less than "
            f"{LOW_AGREEMENT}: little will be accepted"
        )
    return None


def _commonest_share(texts: Iterable[OwnText]) -> float:
    """The share of the commonest token among all output tokens."""
    counts = np.unique(np.concatenate([text.output_ids for text in texts]), return_counts=True)[1]
    return float(counts.max() / counts.sum())


class _Wording(NamedTuple):
    """How a factor is called in the files of a packaging, and counted there."""

    key: str
    shift: int = 0


def _wording(factor: str, packaging: str) -> _Wording:
    if factor == "taps":
        if packaging == "speculators":
            return _Wording("aux_hidden_state_layer_ids", 1)
        return _Wording("target_layer_ids")
    if factor == "causal":
        return _Wording(
            "is_causal" if packaging == "z-lab" else "causal, sliding_window_non_causal"
        )
    if packaging == "speculators":
        return _Wording("sample_from_anchor, speculative_tokens")
    return _Wording("architectures, projector_type")


def diagnosis(
    drafter: ReadableDrafter, better: ReadingReport, num_anchors: int, num_texts: int
) -> str:
    """What is wrong with a drafter of which another reading is better, and what to do."""
    description = drafter.description
    key, shift = _wording(better.factor, description.packaging)
    named: dict[str, tuple[object, object, str]] = {
        "taps": (
            [tap + shift for tap in description.taps],
            [tap + shift for tap in better.value] if isinstance(better.value, tuple) else None,
            "target layers that are tapped",
        ),
        "first_prediction_slot": (
            description.first_prediction_slot,
            better.value,
            "slot that predicts first",
        ),
        "causal": (
            " and ".join(
                sorted({"causal" if x.causal else "bidirectional" for x in description.layers})
            ),
            better.value,
            "attention inside a block",
        ),
    }
    is_now, should_be, what = named[better.factor]
    return (
        f"its config.json ({description.packaging}) says {is_now} for the "
        f"{what} ({key}), and {should_be} fits better: on {num_anchors:,} anchors in {num_texts} "
        f"texts of the target, log q of the target's token is {better.difference:.3f} nat higher "
        f"(standard error {better.standard_error:.3f}). It was trained so, or for another target: "
        "correct the key, or set model.probe to off to draft with it as it is"
    )
