"""The training loop: draw blocks, predict, learn, and now and then save and measure.

A step's data depends on the seed, its number and what was accepted before, all of which is saved:
a run that was killed takes the very steps that it would have taken.

Shape letters: B texts, T tokens of the longest, A anchors of a text, W slots of a block, E hidden
size, F features of a token.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_batch.engine.own_text import OwnText
from bastion_batch.engine.target import Target
from bastion_batch.errors import JobFailedError
from bastion_batch.training.anchors import AnchorSampler, Blocks, TextSpan
from bastion_batch.training.features import FeatureStore, Lesson
from bastion_batch.training.loss import HeadLoss, Labels, common_ids
from bastion_batch.training.metric import TokensPerStep, tokens_per_step
from bastion_batch.training.model import BlockBatch, DrafterModel
from bastion_batch.training.optimizer import Optimizer
from bastion_batch.training.settings import Recipe, Schedule
from bastion_batch.training.state import Measurement, Progress, RunFiles

SAY_SECONDS = 15.0
NUM_NEXT = 8
"""Of the target's likeliest tokens, where its distributions are learnt from."""
_EPSILON = 1e-4
"""Of a score: less is no improvement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What a run works with."""

    target: Target
    model: DrafterModel
    """Holds the first weights."""
    texts: Sequence[OwnText]
    held_out: Sequence[tuple[int, ...]]
    """Prompts."""
    files: RunFiles
    about: dict[str, Any]
    """What the learning curve is of."""


class _Wanted(NamedTuple):
    """What the blocks of a step should predict."""

    places: Tensor
    """Which of the masked slots, `[B, A, W - 1]`: none beyond a text or of a repeated anchor."""
    labels: Labels
    """Of those N slots, `[N, K]`."""
    weights: Tensor
    """Of each, `[N]`."""


class _Step(NamedTuple):
    loss: float
    num_positions: int
    tokens_per_block: float
    """Right predictions from a block's first on, and one more."""


class Trainer:
    """Trains one drafter.

    Args:
        materials: what with.
        recipe: how.
        schedule: when to save, to measure and to end.
        say: takes lines of progress.
    """

    def __init__(
        self,
        materials: Materials,
        recipe: Recipe,
        schedule: Schedule,
        say: Callable[[str], None],
    ) -> None:
        self._materials = materials
        self._recipe = recipe
        self._schedule = schedule
        self._say = say
        target, texts = materials.target, materials.texts
        self._device = target.device
        self._model = materials.model.to(self._device)
        self._width = self._model.shape.block_size
        self._num_tokens = sum(len(text.output_ids) for text in texts)
        self._sampler = AnchorSampler(
            [TextSpan(len(t.prompt_ids), len(t.token_ids) - 1) for t in texts],
            num_texts=recipe.sequences,
            num_anchors=recipe.anchors,
            landing_share=recipe.landing_share,
            seed=recipe.seed,
        )
        self._features = FeatureStore(
            materials.files.features,
            texts,
            target,
            self._model.shape.taps,
            schedule.cache_bytes,
            num_next=NUM_NEXT if recipe.teacher_share else 0,
        )
        self._loss = HeadLoss(
            target.head_weight[: target.ids.vocab_size], self._common_ids(), recipe.seed
        )
        self._optimizer = Optimizer(self._model, recipe.optimizer, recipe.weight_decay)
        self._progress = materials.files.load(self._model, self._optimizer, self._landed)

    def train(self) -> Progress:
        """Train to the last step, or until measurements no longer get better.

        Raises:
            JobFailedError: a gradient is not finite.
        """
        started = said = time.monotonic()
        before = self._progress.seconds
        if not self._progress.curve:
            self._measure()
        while self._progress.step < self._recipe.steps and not self._is_over:
            step = self._step()
            now = time.monotonic()
            self._enter(step, before + now - started)
            if now - said >= SAY_SECONDS:
                said = now
                self._say(self._line(step))
            if self._is_due(self._schedule.check_every):
                self._measure()
                self._save()
            elif self._is_due(self._schedule.save_every):
                self._save()
        self._save()
        return self._progress

    @property
    def _is_over(self) -> bool:
        return self._progress.num_worse >= self._schedule.patience

    def _is_due(self, every: int) -> bool:
        step = self._progress.step
        return step % every == 0 or step == self._recipe.steps

    @property
    def _landed(self) -> Tensor:
        return torch.from_numpy(self._sampler.landed)

    def _common_ids(self) -> np.ndarray | None:
        vocab_size = self._materials.target.ids.vocab_size
        if self._recipe.loss_tokens is None or 2 * self._recipe.loss_tokens >= vocab_size:
            return None
        outputs = np.concatenate([text.output_ids for text in self._materials.texts])
        counts = np.bincount(outputs, minlength=vocab_size)
        return common_ids(counts, self._recipe.loss_tokens)

    # A step

    def _step(self) -> _Step:
        number = self._progress.step
        blocks = self._sampler.draw(number)
        lessons = self._features.of(blocks.numbers)
        wanted, labels, weights = self._wanted(blocks, lessons)
        self._optimizer.zero_grad()
        with self._autocast():
            hidden = self._model(self._batch(blocks, lessons))
        scored = self._loss(hidden[wanted].float(), labels, weights, number)
        scored.loss.backward()
        norm = self._optimizer.clip(self._recipe.max_grad_norm)
        if not torch.isfinite(norm):
            raise JobFailedError(
                f"step {number + 1:,}: the gradient is not finite (loss {scored.loss.item():.3g}); "
                "begin again with a lower --learning-rate and another --out"
            )
        self._optimizer.step(learning_rate(self._recipe, number))
        is_right = torch.zeros_like(wanted)
        is_right[wanted] = scored.is_right_N
        num_right = is_right.cumprod(-1).sum(-1).cpu().numpy()
        counts = [row[: len(a)] for row, a in zip(num_right, blocks.anchors, strict=True)]
        self._sampler.land(blocks, counts)
        mean = float(np.concatenate(counts).mean())
        return _Step(scored.loss.item(), int(wanted.sum()), 1 + mean)

    def _autocast(self) -> torch.autocast:
        is_bfloat16 = self._materials.target.dtype == torch.bfloat16
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_bfloat16)

    def _batch(self, blocks: Blocks, lessons: Sequence[Lesson]) -> BlockBatch:
        anchors_BA = self._anchors(blocks)
        longest = int(anchors_BA.max())
        features = [lesson.taps_SF[:longest].float() for lesson in lessons]
        padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        shape = self._model.shape
        token_ids = np.full((*anchors_BA.shape, self._width), shape.mask_token_id)
        for row, number in enumerate(blocks.numbers):
            ids = np.array(self._materials.texts[number].token_ids)
            token_ids[row, :, 0] = ids[anchors_BA[row]]
        flat = torch.from_numpy(token_ids.reshape(len(token_ids), -1)).to(self._device)
        embeddings = F.embedding(flat, self._materials.target.embedding).float()
        anchors = torch.from_numpy(anchors_BA).to(self._device)
        return BlockBatch(padded.to(self._device), anchors, embeddings)

    def _anchors(self, blocks: Blocks) -> np.ndarray:
        """`[B, A]`; a text with fewer repeats its last one."""
        most = max(len(anchors) for anchors in blocks.anchors)
        rows = [np.pad(a, (0, most - len(a)), mode="edge") for a in blocks.anchors]
        return np.stack(rows)

    def _wanted(self, blocks: Blocks, lessons: Sequence[Lesson]) -> _Wanted:
        anchors_BA = self._anchors(blocks)
        offsets = np.arange(1, self._width)
        weights = np.exp(-(offsets - 1) / self._recipe.decay).astype(np.float32)
        is_wanted = np.zeros((*anchors_BA.shape, self._width - 1), np.bool_)
        token_ids: list[Tensor] = []
        before: list[tuple[Tensor, Tensor]] = []
        for row, (number, anchors) in enumerate(zip(*blocks, strict=True)):
            ids = torch.tensor(self._materials.texts[number].token_ids)
            places = anchors[:, None] + offsets
            there = places < len(ids)
            is_wanted[row, : len(anchors)] = there
            wanted = torch.from_numpy(places[there])
            token_ids.append(ids[wanted])
            _, next_ids, probabilities = lessons[row]
            wanted = (wanted - 1).to(next_ids.device)
            before.append((next_ids[wanted], probabilities[wanted]))
        tokens = torch.cat(token_ids).to(self._device)
        next_ids, probabilities = (torch.cat(parts) for parts in zip(*before, strict=True))
        share = self._recipe.teacher_share
        labels = Labels.mixed(tokens, next_ids, probabilities, share)
        weighed = np.broadcast_to(weights, is_wanted.shape)[is_wanted]
        return _Wanted(
            torch.from_numpy(is_wanted).to(self._device),
            labels,
            torch.from_numpy(weighed).to(self._device),
        )

    # Beside the steps

    def _enter(self, step: _Step, seconds: float) -> None:
        progress, recipe = self._progress, self._recipe
        share = (progress.step + 1) * recipe.sequences / len(self._materials.texts)
        self._progress = replace(
            progress,
            step=progress.step + 1,
            positions=progress.positions + step.num_positions,
            text_tokens=round(share * self._num_tokens),
            seconds=seconds,
            loss_sum=progress.loss_sum + step.loss,
            loss_steps=progress.loss_steps + 1,
        )

    def _measure(self) -> None:
        """Decode the held-out prompts; the best drafter so far becomes the checkpoint."""
        files, schedule = self._materials.files, self._schedule
        files.write_drafter(files.candidate, self._model)
        found = tokens_per_step(
            self._materials.target,
            files.candidate,
            self._materials.held_out,
            max_new_tokens=schedule.check_tokens,
            tree_nodes=schedule.tree_nodes,
        )
        progress = self._progress
        mean_loss = progress.loss_sum / progress.loss_steps if progress.loss_steps else None
        point = Measurement(
            step=progress.step,
            positions=progress.positions,
            text_tokens=progress.text_tokens,
            seconds=round(progress.seconds, 1),
            loss=mean_loss,
            chain=round(found.chain, 4),
            tree=round(found.tree, 4),
        )
        is_better = found.score > progress.best_score + _EPSILON
        if is_better:
            files.write_drafter(files.out, self._model)
        self._progress = replace(
            progress,
            best_score=max(found.score, progress.best_score),
            num_worse=0 if is_better else progress.num_worse + 1,
            loss_sum=0.0,
            loss_steps=0,
            curve=(*progress.curve, point),
        )
        files.write_curve(self._progress.curve, self._materials.about)
        self._say(self._measured_line(point, found, is_better=is_better))

    def _save(self) -> None:
        self._features.save()
        self._materials.files.save(self._model, self._optimizer, self._landed, self._progress)

    def _line(self, step: _Step) -> str:
        progress = self._progress
        rate = progress.seconds / progress.step
        left = rate * (self._recipe.steps - progress.step)
        mean = progress.loss_sum / max(1, progress.loss_steps)
        return (
            f"step {progress.step:,} of {self._recipe.steps:,} | loss {mean:.3f} | "
            f"{step.tokens_per_block:.2f} tokens/block | {rate:.2f} s/step | "
            f"{left / 60:.0f} min left"
        )

    def _measured_line(self, point: Measurement, found: TokensPerStep, *, is_better: bool) -> str:
        verdict = "best so far, kept" if is_better else f"best {self._progress.best_score:.3f}"
        return (
            f"step {point.step:,}: held-out tokens/step chain {found.chain:.3f}, "
            f"tree of {self._schedule.tree_nodes} {found.tree:.3f} ({verdict})"
        )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rises linearly, then falls along a cosine to zero at the last step."""
    warmup = max(1, round(recipe.warmup_share * recipe.steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, recipe.steps - warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
