"""An engine without a model: a function of the request, at a settable pace.

For tests of scheduling and of faults: the text depends on the request's noise key alone, like a
real engine's, so that any two ways to run a job must give the same rows.
"""

import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from bastion_batch.cluster.engines import TargetFiles
from bastion_batch.cluster.node import NodeShare
from bastion_batch.config import JobConfig
from bastion_batch.errors import ModelError
from bastion_batch.records import (
    Completion,
    EngineTotals,
    Request,
    RowFault,
    StepRecord,
    StepTiming,
)

MAX_CONTEXT = 4096
TOKENS_PER_STEP = 2


class LetterTokenizer:
    """One token per UTF-8 byte; no chat template."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The bytes, as ids."""
        return {"input_ids": list(text.encode())}

    def decode(self, ids: tuple[int, ...], **_: Any) -> str:  # noqa: ANN401
        """The text of these bytes."""
        return bytes(ids).decode(errors="replace")


class ScriptedInfo(NamedTuple):
    """As a real engine describes itself."""

    device: str = "scripted"
    device_type: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    target: str = "scripted"
    drafter: str | None = None
    method: str = "bastion"
    max_batch: int = 1
    calibration: dict[str, float] = {}  # noqa: RUF012 - an immutable default in practice


def scripted_ids(request: Request) -> tuple[int, ...]:
    """The output of a request: 1 to `max_new_tokens` letters."""
    length = 1 + request.noise_key % request.sampling.max_new_tokens
    name = f"{request.noise_key}\0{len(request.prompt_ids)}".encode()
    seed = b"".join(blake2b(name + bytes([i])).digest() for i in range(-(-length // 64)))
    return tuple(97 + byte % 26 for byte in seed[:length])


@dataclass(slots=True)
class _Row:
    request: Request
    script: tuple[int, ...]
    num_done: int
    records: list[StepRecord]


class ScriptedEngine:
    """Obeys the interface of `bastion_batch.engine.Engine`; every step takes as long as told."""

    def __init__(self, *, max_batch: int = 8, step_seconds: float = 0.0, threads: int = 1) -> None:
        self.max_batch = max_batch
        self.max_context = MAX_CONTEXT
        self.tokenizer = LetterTokenizer()
        self.info = ScriptedInfo(max_batch=max_batch, threads=threads)
        self.totals = EngineTotals()
        self._step_seconds = step_seconds
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []

    @property
    def has_work(self) -> bool:
        """Whether a row is queued or live."""
        return bool(self._waiting or self._rows)

    @property
    def num_waiting(self) -> int:
        """Rows queued."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows live."""
        return len(self._rows)

    def save_profile(self) -> None:
        """Nothing was learnt."""

    def check(self, num_prompt_tokens: int) -> RowFault | None:
        """Why a prompt of so many tokens cannot be decoded, or None."""
        if num_prompt_tokens >= self.max_context:
            message = f"prompt of {num_prompt_tokens} tokens; the limit is {self.max_context - 1}"
            return RowFault("prompt_too_long", message)
        return None

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Prefill the rows that enter, and commit two tokens of every other."""
        entering = [
            self._waiting.popleft()
            for _ in range(min(len(self._waiting), self.max_batch - len(self._rows)))
        ]
        decoding = list(self._rows)
        self._rows += [_Row(request, scripted_ids(request), 0, []) for request in entering]
        time.sleep(self._step_seconds)
        timing = self._timing(sum(len(request.prompt_ids) for request in entering))
        num_committed = sum(_advance(row, TOKENS_PER_STEP, "bastion", timing) for row in decoding)
        num_prefilled = sum(
            _advance(row, 1, "prefill", timing) for row in self._rows[len(decoding) :]
        )
        self.totals = self.totals.plus(
            EngineTotals(
                num_steps=1,
                num_row_steps=len(decoding),
                num_committed=num_committed + num_prefilled,
                num_decoded=num_committed,
                num_nodes=TOKENS_PER_STEP * len(decoding),
                num_prefill_tokens=timing.prefill_tokens,
                step_seconds=self._step_seconds,
                plain_steps=1,
                plain_tokens=len(decoding),
                plain_seconds=self._step_seconds,
                paired_tokens=TOKENS_PER_STEP * len(decoding),
                paired_seconds=self._step_seconds,
            )
        )
        ended = [row for row in self._rows if row.num_done == len(row.script)]
        self._rows = [row for row in self._rows if row.num_done < len(row.script)]
        return [_completion(row) for row in ended]

    def _timing(self, num_prefill_tokens: int) -> StepTiming:
        seconds = self._step_seconds
        return StepTiming(
            step=self.totals.num_steps,
            method="bastion",
            batch_size=len(self._rows),
            budget_nodes=TOKENS_PER_STEP * len(self._rows),
            prefill_tokens=num_prefill_tokens,
            predicted_verify_seconds=seconds,
            predicted_step_seconds=seconds,
            prefill_seconds=0.0,
            draft_seconds=0.0,
            build_seconds=0.0,
            verify_seconds=seconds,
            commit_seconds=0.0,
            other_seconds=0.0,
            step_seconds=seconds,
        )


def _advance(row: _Row, num_tokens: int, method: str, timing: StepTiming) -> int:
    """Commit up to so many tokens; how many it was."""
    num_committed = min(num_tokens, len(row.script) - row.num_done)
    row.records.append(
        StepRecord(
            timing=timing,
            method=method,
            context_length=len(row.request.prompt_ids) + row.num_done,
            num_nodes=0 if method == "prefill" else TOKENS_PER_STEP,
            tree_depth=0 if method == "prefill" else 1,
            top1_depth=0 if method == "prefill" else 1,
            num_accepted=0 if method == "prefill" else TOKENS_PER_STEP - 1,
            num_committed=num_committed,
            expected_tokens=float(num_tokens),
            expected_tokens_raw=float(num_tokens),
        )
    )
    row.num_done += num_committed
    return num_committed


def _completion(row: _Row) -> Completion:
    request = row.request
    at_limit = len(row.script) == request.sampling.max_new_tokens
    return Completion(
        row_id=request.row_id,
        sample_index=request.sample_index,
        output_ids=row.script,
        text=bytes(row.script).decode(),
        finish_reason="length" if at_limit else "stop",
        num_prompt_tokens=len(request.prompt_ids),
        num_steps=sum(record.method != "prefill" for record in row.records),
        records=tuple(row.records),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngines:
    """Builds scripted engines; the target must be named ``scripted``."""

    max_batch: int = 8
    step_seconds: float = 0.0

    def check(self, job: JobConfig) -> TargetFiles:
        """The one target there is."""
        if job.model.target != "scripted":
            raise ModelError(f"target {job.model.target}: only 'scripted' has no model")
        return TargetFiles("scripted", Path(), "scripted-1")

    def load_tokenizer(self, target: TargetFiles) -> LetterTokenizer:
        """One token per byte."""
        return LetterTokenizer()

    def build(self, job: JobConfig, device: str, share: NodeShare) -> ScriptedEngine:
        """An engine at this pace."""
        return ScriptedEngine(
            max_batch=self.max_batch, step_seconds=self.step_seconds, threads=share.num_threads
        )
