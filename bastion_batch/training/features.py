"""What the target makes of the training texts: computed once, kept on disk up to a cap.

    features.bin    the taps of the first texts, one after the other, in the target's dtype
    teacher.bin     the target's likeliest next tokens and their probabilities, if they are wanted
    known.npy       which of them are there; written after what it vouches for

All belong to one run: whoever changes its texts, taps or target uses another directory.

Shape letters: S tokens of a text, F features of a token, K next tokens that are kept.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.own_text import OwnText, TextReading, read_texts
from bastion_batch.engine.target import Target
from bastion_batch.errors import OutputError

PIECE_TOKENS = 256
"""Tokens whose logits are held at once."""


class Lesson(NamedTuple):
    """A text as a drafter learns from it."""

    taps_SF: Tensor
    next_ids_SK: Tensor
    """What the target holds likeliest after each token, the likeliest first."""
    next_probabilities_SK: Tensor
    """The target's, at temperature 1; together at most 1."""


class FeatureStore:
    """Taps and next tokens of texts, by their numbers.

    Args:
        directory: of the files.
        texts: all of them.
        target: whose text it is.
        taps: 0-based layers.
        cap_bytes: of disk.
        num_next: next tokens that are kept after each token; 0 for none.

    Raises:
        OutputError: the disk has no room for what is to be kept.
    """

    def __init__(
        self,
        directory: Path,
        texts: Sequence[OwnText],
        target: Target,
        taps: tuple[int, ...],
        cap_bytes: int,
        num_next: int = 0,
    ) -> None:
        self._directory = directory
        self._texts = texts
        self._target = target
        self._taps = taps
        self._num_next = num_next
        self._width = len(taps) * target.embedding.shape[1]
        ends = np.cumsum([len(text.token_ids) for text in texts])
        self._token_bytes = self._width * target.dtype.itemsize + 8 * num_next
        self._num_kept = int(np.searchsorted(ends * self._token_bytes, cap_bytes, side="right"))
        self._starts = np.concatenate([[0], ends])
        self._known = np.zeros(self._num_kept, np.bool_)
        self._files: Lesson | None = None
        if self._num_kept:
            self._open()

    @property
    def num_kept(self) -> int:
        """Texts that have room on disk."""
        return self._num_kept

    def of(self, numbers: Sequence[int]) -> list[Lesson]:
        """What some texts teach, on the target's device."""
        missing = [n for n in dict.fromkeys(numbers) if n >= self._num_kept or not self._known[n]]
        texts = [self._texts[number] for number in missing]
        readings = read_texts(self._target, texts, self._taps)
        computed = dict(zip(missing, map(self._lesson, texts, readings), strict=True))
        for number, lesson in computed.items():
            if number < self._num_kept:
                for place, part in zip(self._kept(number), lesson, strict=True):
                    place.copy_(part)
                self._known[number] = True
        return [
            computed[n]
            if n in computed
            else Lesson(*(part.to(self._target.device) for part in self._kept(n)))
            for n in numbers
        ]

    def save(self) -> None:
        """Make what is there known to the next run."""
        if self._files is None:
            return
        for path in self._paths():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        part = self._directory / "known.part"
        with part.open("wb") as file:
            np.save(file, self._known)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._directory / "known.npy")

    @torch.inference_mode()
    def _lesson(self, text: OwnText, reading: TextReading) -> Lesson:
        """Next tokens are looked up from the prompt's last token on; before it they stay empty."""
        num_tokens = len(reading.hidden_SE)
        next_ids = reading.hidden_SE.new_zeros(num_tokens, self._num_next, dtype=torch.int32)
        probabilities = torch.zeros_like(next_ids, dtype=torch.float32)
        first = max(0, len(text.prompt_ids) - 1)
        for start in range(first, num_tokens if self._num_next else first, PIECE_TOKENS):
            piece = slice(start, start + PIECE_TOKENS)
            logits = self._target.logits(reading.hidden_SE[piece]).float()
            best, next_ids[piece] = logits.topk(self._num_next, -1)
            probabilities[piece] = (best - logits.logsumexp(-1, keepdim=True)).exp_()
        return Lesson(reading.taps_SF, next_ids, probabilities)

    def _paths(self) -> Iterator[Path]:
        yield self._directory / "features.bin"
        if self._num_next:
            yield self._directory / "teacher.bin"

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        known = self._directory / "known.npy"
        num_tokens = int(self._starts[self._num_kept])
        self._require_room(num_tokens * self._token_bytes)
        paths = list(self._paths())
        if known.exists() and all(path.exists() for path in paths):
            found = np.load(known)[: self._num_kept]
            self._known[: len(found)] = found
        size, dtype = num_tokens * self._width, self._target.dtype
        taps = torch.from_file(str(paths[0]), shared=True, size=size, dtype=dtype)
        teacher = torch.zeros(0, dtype=torch.int32)
        if self._num_next:
            size = num_tokens * 2 * self._num_next
            teacher = torch.from_file(str(paths[1]), shared=True, size=size, dtype=torch.int32)
        pairs = teacher.view(num_tokens, 2, self._num_next)
        probabilities = pairs[:, 1].view(torch.float32)
        self._files = Lesson(taps.view(num_tokens, -1), pairs[:, 0], probabilities)

    def _require_room(self, num_bytes: int) -> None:
        """A mapped file that finds the disk full ends the process without a word."""
        there = sum(path.stat().st_blocks * 512 for path in self._paths() if path.exists())
        free = shutil.disk_usage(self._directory).free
        if num_bytes - there > free:
            raise OutputError(
                f"the texts' taps need {num_bytes / 1e9:.1f} GB in {self._directory}, which has "
                f"{free / 1e9:.1f} GB; give a smaller --cache-gb"
            )

    def _kept(self, number: int) -> Lesson:
        assert self._files is not None
        start, stop = self._starts[number : number + 2]
        return Lesson(*(part[start:stop] for part in self._files))
