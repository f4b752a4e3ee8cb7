"""Where workers get their engines from: real checkpoints, or the scripted engine of the tests."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bastion_batch.cluster.node import NodeShare
from bastion_batch.cluster.start_memory import Rows, build_within_memory
from bastion_batch.config import JobConfig
from bastion_batch.errors import JobFileError
from bastion_batch.records import Completion, Exported, Request, RowFault, RowKey

if TYPE_CHECKING:
    from bastion_batch.engine.checkpoints import ModelFiles


class DecodingEngine(Protocol):
    """What a worker needs of an engine: see `bastion_batch.engine.Engine`."""

    max_batch: int
    tokenizer: Any

    def add(self, request: Request | Exported) -> None:
        """Queue a request that `check` accepts, or a row that another engine has exported."""
        ...

    def export(self, row_id: str, sample_index: int = 0) -> Exported:
        """Take a row out with its tokens; ValueError if it is neither waiting nor live."""
        ...

    def num_tokens(self) -> Mapping[RowKey, int]:
        """Output tokens so far of every row that it holds, live or waiting."""
        ...

    def step(self) -> list[Completion]:
        """Decode one step of all live rows; the completions that ended in it."""
        ...

    def check(self, num_prompt_tokens: int) -> RowFault | None:
        """Why a prompt of so many tokens cannot be decoded, or None."""
        ...

    def save_profile(self) -> None:
        """Keep what was learnt about the device, for the next engine like this one."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a row is queued or live."""
        ...

    @property
    def num_waiting(self) -> int:
        """Rows queued."""
        ...

    @property
    def num_running(self) -> int:
        """Rows live."""
        ...

    @property
    def info(self) -> Any:  # noqa: ANN401 - a named tuple of JSON values
        """What the engine is and runs on, for `run.json`."""
        ...

    @property
    def totals(self) -> Any:  # noqa: ANN401 - a named tuple with the fields of EngineTotals
        """What it has done so far."""
        ...


class TargetFiles(NamedTuple):
    """The target as the plan needs it."""

    name: str
    path: Path
    digest: str


class EngineSource(Protocol):
    """Checks a job's models in the driver, and builds the engine in each worker."""

    def check(self, job: JobConfig) -> "TargetFiles | ModelFiles":
        """Resolve target and drafter; ModelError, before any device's time is spent."""
        ...

    def known_probe(self, job: JobConfig) -> str | None:
        """What is known on this machine of the drafter's probe; None where none is made."""
        ...

    def load_tokenizer(self, target: "TargetFiles | ModelFiles") -> Any:  # noqa: ANN401
        """The target's tokenizer."""
        ...

    def auto_dtype(self, device: str) -> str:
        """What ``dtype: auto`` means on this process's device."""
        ...

    def build(self, job: JobConfig, device: str, share: NodeShare) -> DecodingEngine:
        """Load the models onto this process's device."""
        ...


class PretrainedEngines:
    """Engines from checkpoints: `bastion_batch.engine.Engine`."""

    def check(self, job: JobConfig) -> "ModelFiles":
        """Resolve target and drafter on this machine."""
        from bastion_batch.engine.checkpoints import (
            resolve_drafter,
            resolve_target,
            target_vocab_size,
        )
        from bastion_batch.engine.vocabularies import require_same_vocabulary

        target = resolve_target(job.model.target, job.model.revision)
        fault = job.decoding.sampling.fault(target_vocab_size(target), frozenset())
        if fault is not None:
            raise JobFileError(f"decoding: {fault}")
        if job.decoding.method != "ar":
            drafter = resolve_drafter(job.model.drafter, target.name)
            if drafter is not None:
                require_same_vocabulary(drafter.path, target.path)
        return target

    def known_probe(self, job: JobConfig) -> str | None:
        """The verdict that is kept on this machine, or that there is none yet."""
        from bastion_batch.engine.checkpoints import resolve_drafter, resolve_target
        from bastion_batch.engine.drafters.formats import describe_directory
        from bastion_batch.engine.probe_report import load_report, probe_key

        if job.decoding.method == "ar" or job.model.drafter is None:
            return None
        if job.model.probe == "off":
            return "off: the drafter is taken as its files describe it"
        target = resolve_target(job.model.target, job.model.revision)
        drafter = resolve_drafter(job.model.drafter, target.name)
        assert drafter is not None
        reading = describe_directory(drafter.path)
        report = load_report(probe_key(target.digest, drafter.digest, reading))
        return "not made here yet; made at the start" if report is None else report.verdict

    def load_tokenizer(self, target: "TargetFiles | ModelFiles") -> Any:  # noqa: ANN401
        """The target's tokenizer."""
        from bastion_batch.engine.checkpoints import load_tokenizer

        return load_tokenizer(target.path)

    def auto_dtype(self, device: str) -> str:
        """bfloat16 where the device is fast at it."""
        from bastion_batch.engine.device import pick_device, pick_dtype

        return str(pick_dtype("auto", pick_device(device))).removeprefix("torch.")

    def build(self, job: JobConfig, device: str, share: NodeShare) -> DecodingEngine:
        """Load the models; sets the threads of this process, so torch must not have run yet."""
        os.environ["OMP_NUM_THREADS"] = str(share.num_threads)  # Ray has set it to an actor's CPUs
        from transformers.utils import logging as transformers_logging

        from bastion_batch.cluster.shared_profiles import shared_profiles
        from bastion_batch.engine import Engine

        transformers_logging.disable_progress_bar()  # the log of a worker is not a terminal

        def build(max_batch: Rows) -> Engine:
            return Engine.from_pretrained(
                job.model.target,
                job.model.drafter,
                revision=job.model.revision,
                dtype=job.model.dtype,
                device=device,
                method=job.decoding.method,
                nodes_per_row=job.decoding.nodes_per_row,
                max_nodes=job.decoding.max_nodes,
                max_batch=max_batch,
                memory_share=share.memory_share,
                threads=share.num_threads,
                baseline_bursts=True,
                probe=job.model.probe == "auto",
                profiles=shared_profiles(job),
            )

        engine = build_within_memory(build, job.workers.max_batch)
        engine.save_profile()  # for workers that come later
        return engine


def as_mapping(values: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any named tuple
    """A named tuple's fields and values."""
    return values._asdict()
