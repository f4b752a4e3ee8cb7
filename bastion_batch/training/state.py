"""What a training run leaves on disk, so that a killed one goes on as if nothing had happened.

    OUT/config.json, OUT/model.safetensors    the best drafter so far: a checkpoint to use
    OUT/curve.json                            every measurement, with data and steps behind it
    OUT/training/run.json                     what the run is; one that is not the same is refused
    OUT/training/state.safetensors            weights, optimiser, landings; progress in its header
    OUT/training/features/                    the texts' taps

Every file gets its name when it is whole.
"""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion_batch.errors import OutputError
from bastion_batch.training.model import DrafterModel
from bastion_batch.training.optimizer import STATE_KEYS, Optimizer

STATE = "state.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A point of the learning curve."""

    step: int
    positions: int
    """Predicted positions trained on so far."""
    text_tokens: int
    """Output tokens of the texts seen so far, each epoch counted."""
    seconds: float
    """Of training, over all runs."""
    loss: float | None
    """Mean since the measurement before; None before the first step."""
    chain: float
    tree: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    positions: int = 0
    text_tokens: int = 0
    seconds: float = 0.0
    best_score: float = 0.0
    num_worse: int = 0
    """Measurements since the best one."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    """Since the last measurement."""
    curve: tuple[Measurement, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> "Progress":
        """From the JSON of `to_json`."""
        values = json.loads(text)
        values["curve"] = tuple(Measurement(**point) for point in values["curve"])
        return cls(**values)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self))


class RunFiles:
    """The files of one run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.private = out / "training"
        self.features = self.private / "features"
        self.candidate = self.private / "candidate"

    @contextmanager
    def held(self) -> Generator[None]:
        """Keep other trainers out of this directory.

        Raises:
            OutputError: one is there, or the directory cannot be written.
        """
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            lock = (self.private / "lock").open("a")
        except OSError as error:
            raise OutputError(f"{self.out} cannot be written: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"another training run writes {self.out}") from None
            yield

    def require_same_run(self, identity: Mapping[str, Any]) -> None:
        """Note what the run is, or check that it is the one that began here.

        Raises:
            OutputError: naming what differs, with both values.
        """
        path = self.private / "run.json"
        now = json.loads(json.dumps(identity))
        if not path.exists():
            _write(path, (json.dumps(now, indent=2) + "\n").encode())
            return
        then = json.loads(path.read_text(encoding="utf-8"))
        lines = [
            f"  {name}: {then.get(name)} -> {now.get(name)}"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        if lines:
            raise OutputError(
                f"{self.out} holds a different training run; give another --out (with --from "
                f"{self.out} it begins where that one is), or restore what differs "
                "(then -> now):\n" + "\n".join(lines)
            )

    def write_drafter(self, directory: Path, model: DrafterModel) -> None:
        """Write a checkpoint in z-lab's format."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in model.state_dict().items()
        }
        _save_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
        config = json.dumps(model.shape.to_config(), indent=1) + "\n"
        _write(directory / "config.json", config.encode())

    def write_curve(self, curve: tuple[Measurement, ...], about: Mapping[str, Any]) -> None:
        """Write the learning curve and what it is of."""
        value = {**about, "curve": [asdict(point) for point in curve]}
        _write(self.out / "curve.json", (json.dumps(value, indent=1) + "\n").encode())

    def save(
        self,
        model: DrafterModel,
        optimizer: Optimizer,
        landed: Tensor,
        progress: Progress,
    ) -> None:
        """Save everything that the next step depends on."""
        tensors = {"landed": landed}
        for name, parameter in model.named_parameters():
            tensors[f"weights.{name}"] = parameter.detach().cpu()
            for key, value in optimizer.state_of(parameter).items():
                tensors[f"{key}.{name}"] = value.detach().cpu()
        metadata = {"progress": progress.to_json()}
        _save_tensors(self.private / STATE, tensors, metadata)

    def progress(self) -> Progress:
        """How far the saved state is.

        Raises:
            OutputError: the state cannot be read.
        """
        path = self.private / STATE
        if not path.exists():
            return Progress()
        try:
            with safe_open(path, framework="pt") as file:
                return Progress.parse(file.metadata()["progress"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path} cannot be read: {error}; remove it to begin anew") from None

    def load(self, model: DrafterModel, optimizer: Optimizer, landed: Tensor) -> Progress:
        """Go on from the last saved state, or begin.

        Raises:
            OutputError: the state cannot be read.
        """
        progress = self.progress()
        if progress.step == 0:
            return progress
        tensors = load_file(self.private / STATE)
        landed.copy_(tensors["landed"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(tensors[f"weights.{name}"])
            saved = {k: tensors[f"{k}.{name}"] for k in STATE_KEYS if f"{k}.{name}" in tensors}
            optimizer.restore(parameter, saved)
        return progress


def _save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, metadata)
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
