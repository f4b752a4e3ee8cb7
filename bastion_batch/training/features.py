"""The taps of the training texts: computed by the target once, kept on disk up to a cap.

    features.bin    the taps of the first texts, one after the other, in the target's dtype
    known.npy       which of them are there; written after what it vouches for

Both belong to one run: whoever changes its texts, taps or target uses another directory.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bastion_batch.engine.own_text import OwnText, tap_features
from bastion_batch.engine.target import Target
from bastion_batch.errors import OutputError


class FeatureStore:
    """Taps of texts, by their numbers.

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
    ) -> None:
        self._directory = directory
        self._texts = texts
        self._target = target
        self._taps = taps
        self._width = len(taps) * target.embedding.shape[1]
        ends = np.cumsum([len(text.token_ids) for text in texts])
        bytes_per_token = self._width * target.dtype.itemsize
        self._num_kept = int(np.searchsorted(ends * bytes_per_token, cap_bytes, side="right"))
        self._starts = np.concatenate([[0], ends])
        self._known = np.zeros(self._num_kept, np.bool_)
        self._file: Tensor | None = None
        if self._num_kept:
            self._open()

    @property
    def num_kept(self) -> int:
        """Texts whose taps have room on disk."""
        return self._num_kept

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """The taps of every token of some texts, each `[S, F]`, on the target's device."""
        missing = [n for n in dict.fromkeys(numbers) if n >= self._num_kept or not self._known[n]]
        computed = dict(
            zip(
                missing,
                tap_features(self._target, [self._texts[n] for n in missing], self._taps),
                strict=True,
            )
        )
        for number, features in computed.items():
            if number < self._num_kept:
                self._place(number).copy_(features)
                self._known[number] = True
        return [
            computed[n] if n in computed else self._place(n).to(self._target.device)
            for n in numbers
        ]

    def save(self) -> None:
        """Make what is there known to the next run."""
        if self._file is None:
            return
        with (self._directory / "features.bin").open("rb") as file:
            os.fsync(file.fileno())
        part = self._directory / "known.part"
        with part.open("wb") as file:
            np.save(file, self._known)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._directory / "known.npy")

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path, known = self._directory / "features.bin", self._directory / "known.npy"
        size = int(self._starts[self._num_kept]) * self._width
        self._require_room(path, size * self._target.dtype.itemsize)
        if known.exists() and path.exists():
            found = np.load(known)[: self._num_kept]
            self._known[: len(found)] = found
        self._file = torch.from_file(str(path), shared=True, size=size, dtype=self._target.dtype)

    def _require_room(self, path: Path, num_bytes: int) -> None:
        """A mapped file that finds the disk full ends the process without a word."""
        there = path.stat().st_blocks * 512 if path.exists() else 0
        free = shutil.disk_usage(self._directory).free
        if num_bytes - there > free:
            raise OutputError(
                f"the texts' taps need {num_bytes / 1e9:.1f} GB in {self._directory}, which has "
                f"{free / 1e9:.1f} GB; give a smaller --cache-gb"
            )

    def _place(self, number: int) -> Tensor:
        assert self._file is not None
        start, stop = self._starts[number : number + 2]
        return self._file[start * self._width : stop * self._width].view(-1, self._width)
