"""What a measurement needs before it starts: an idle machine, models, prompts, and its setting."""

import gzip
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

from bastion_batch.bench.blocks import Prompt
from bastion_batch.engine import Engine
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target
from bastion_batch.engine.device import device_name, pick_device, pick_dtype
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.target import Target
from bastion_batch.errors import InputError
from bastion_batch.records import Method, SamplingParams

METHODS = ("ar", "dflash", "ddtree", "bastion")
MAX_BUSY_PERCENT = 15.0
QUICK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    target: str = "smollm2-135m-instruct"
    drafter: str | None = "default"
    """None: only plain decoding can be measured."""
    prompts: Path = Path("jobs/data/prompts.jsonl")
    """JSON lines with a field `prompt` and perhaps a field `kind`; may be gzipped."""
    methods: tuple[str, ...] = METHODS
    batches: tuple[int, ...] = (1,)
    """Batch sizes, one after the other."""
    seconds: float = 360.0
    """About how long each batch size takes, the loading of models apart."""
    block_steps: int = 20
    """Counted steps of one arm's turn."""
    warm_up_row_steps: int = 400
    """Steps of rows that `bastion` decodes before anything counts: it learns what is accepted."""
    warm_up_steps: int = 100
    """And steps of the whole batch, at least: it learns whether drafting pays."""
    num_prompts: int = 100
    max_new_tokens: int = 256
    temperature: float = 0.0
    dtype: str = "auto"
    threads: int | None = None
    nodes_per_row: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Budgets that `ddtree` is tried with."""
    max_nodes: int = 512
    """Most drafted nodes of a pass."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise InputError(f"unknown methods {', '.join(unknown)}; known: {', '.join(METHODS)}")
        if min(self.batches, default=0) < 1:
            raise InputError(f"batch sizes {self.batches}: at least one, each at least 1")
        if not self.prompts.is_file():
            raise InputError(f"prompts file {self.prompts} does not exist")

    @property
    def sampling(self) -> SamplingParams:
        """How every row is decoded."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


def refuse_loaded_machine() -> None:
    """Raise unless the processors are idle: a timing on a loaded machine is a wrong number.

    Raises:
        InputError: naming how busy the machine is.
    """
    busy = psutil.cpu_percent(interval=1.0)
    if busy > MAX_BUSY_PERCENT:
        raise InputError(
            f"the machine's processors are {busy:.0f} % busy, over {MAX_BUSY_PERCENT:.0f} %: "
            "stop what runs, or pass --force to time anyway"
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """Loaded models and prompts."""

    config: BenchConfig
    target: Target
    target_path: Path
    drafter_path: Path | None
    prompts: tuple[Prompt, ...] = field(repr=False)
    kinds: tuple[str, ...] = field(repr=False)
    """Of each prompt; the file's name where it does not say."""

    @classmethod
    def load(cls, config: BenchConfig) -> "Bench":
        """Load what the configuration names; sets the number of threads of this process.

        Raises:
            ModelError: a model cannot be used.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.set_float32_matmul_precision("highest")
        device = pick_device("auto")
        path = resolve_target(config.target).path
        drafter = resolve_drafter(config.drafter, config.target)
        prompts = list(islice(_prompts(config.prompts, path), config.num_prompts))
        return cls(
            config,
            Target.load(path, pick_dtype(config.dtype, device), device),
            path,
            drafter.path if drafter else None,
            tuple(ids for _, ids in prompts),
            tuple(kind for kind, _ in prompts),
        )

    @property
    def choosing_prompts(self) -> Sequence[Prompt]:
        """The half of the prompts on which budgets are chosen."""
        return self.prompts[0::2]

    @property
    def comparing_prompts(self) -> Sequence[Prompt]:
        """The other half, on which the chosen ones are compared."""
        return self.prompts[1::2] or self.prompts

    def drafter(self) -> DFlashDrafter:
        """A new drafter with an empty cache.

        Raises:
            InputError: the configuration has none.
        """
        if self.drafter_path is None:
            raise InputError(f"target {self.config.target} has no drafter here: pass --drafter")
        return load_drafter(self.drafter_path, self.target)

    def engine(self, batch_size: int, drafter: Drafter | None, method: Method) -> Engine:
        """A new engine, which measures what its passes cost.

        Raises:
            InputError: so many rows do not fit into its memory.
        """
        engine = Engine(
            self.target,
            drafter,
            method=method,
            max_batch=batch_size,
            max_nodes=self.config.max_nodes,
        )
        if engine.max_batch < batch_size:
            raise InputError(f"batch {batch_size}: memory holds {engine.max_batch} rows")
        return engine

    def setting(self) -> dict[str, Any]:
        """On what, with what and how it was measured; JSON-able."""
        config = self.config
        options = {name: _plain(getattr(config, name)) for name in config.__slots__}
        options.pop("batches")
        return {
            **options,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "device": device_name(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        }


def _prompts(file: Path, target_path: Path) -> Iterator[tuple[str, Prompt]]:
    """Kind and token ids of every prompt of a file."""
    tokenizer = load_tokenizer(target_path)
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    for line in content.decode("utf-8").splitlines():
        row = json.loads(line)
        text, kind = row["prompt"], str(row.get("kind", file.name.partition(".")[0]))
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        yield kind, tuple(ids)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
