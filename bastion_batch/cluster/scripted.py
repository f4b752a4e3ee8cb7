"""An engine without a model: a function of the request, at a settable pace.

For tests of scheduling and of faults: the text depends on the request's noise key alone, like a
real engine's, so that any two ways to run a job must give the same rows. Rows can be told to do
harm, each in its first step after its prompt's:

    die       the process ends by SIGKILL
    raise     the step raises, as after a CUDA fault
    hang      the step never ends
    stall     the row gets no more tokens, the others do
    refuse    the engine cannot go on with the row: `out_of_memory`
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bastion_batch.cluster.engines import TargetFiles
from bastion_batch.cluster.node import NodeShare
from bastion_batch.config import JobConfig
from bastion_batch.errors import ModelError
from bastion_batch.records import (
    Completion,
    EngineTotals,
    Exported,
    Request,
    RowFault,
    RowKey,
    StepRecord,
    StepTiming,
)

MAX_CONTEXT = 4096
TOKENS_PER_STEP = 2

Harm = Literal["die", "raise", "hang", "stall", "refuse"]


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
    num_steps: int

    @property
    def key(self) -> tuple[str, int]:
        return self.request.row_id, self.request.sample_index

    @property
    def exported(self) -> Exported:
        request = replace(self.request, generated_ids=self.script[: self.num_done])
        return Exported(request, tuple(self.records), self.num_steps)


class ScriptedEngine:
    """Obeys the interface of `bastion_batch.engine.Engine`; every step takes as long as told.

    Args:
        max_batch: rows live at a time.
        step_seconds: of every step.
        threads: for `info`.
        harm: what rows do, by `row_id`.
        max_context: tokens that a prompt must stay below.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        *,
        max_batch: int = 8,
        step_seconds: float = 0.0,
        threads: int = 1,
        harm: Mapping[str, Harm] | None = None,
        max_context: int = MAX_CONTEXT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_batch = max_batch
        self.max_context = max_context
        self.tokenizer = LetterTokenizer()
        self.info = ScriptedInfo(max_batch=max_batch, threads=threads)
        self.totals = EngineTotals()
        self._step_seconds = step_seconds
        self._harm = harm or {}
        self._sleep = sleep
        self._waiting: deque[_Row] = deque()
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

    def add(self, request: Request | Exported) -> None:
        """Queue a request, or a row that another engine has exported."""
        coming = request if isinstance(request, Exported) else Exported(request)
        script = scripted_ids(coming.request)
        done = coming.request.generated_ids
        assert done == script[: len(done)], "the tokens so far are another row's"
        records = list(coming.records)
        self._waiting.append(_Row(coming.request, script, len(done), records, coming.num_steps))

    def export(self, row_id: str, sample_index: int = 0) -> Exported:
        """Take a row out with its tokens."""
        for rows in (self._waiting, self._rows):
            for row in rows:
                if row.key == (row_id, sample_index):
                    rows.remove(row)
                    return row.exported
        raise ValueError(f"row {row_id}, sample {sample_index}: neither waiting nor live")

    def num_tokens(self) -> dict[RowKey, int]:
        """Output tokens so far of every row."""
        return {row.key: row.num_done for row in (*self._rows, *self._waiting)}

    def step(self) -> list[Completion]:
        """Prefill the rows that enter, and commit two tokens of every other."""
        entering = [
            self._waiting.popleft()
            for _ in range(min(len(self._waiting), self.max_batch - len(self._rows)))
        ]
        refused = self._do_harm()
        decoding = [row for row in self._rows if self._harm.get(row.key[0]) != "stall"]
        self._rows += entering
        self._sleep(self._step_seconds)
        timing = self._timing(sum(len(row.request.prompt_ids) + row.num_done for row in entering))
        num_committed = sum(_advance(row, TOKENS_PER_STEP, timing) for row in decoding)
        num_prefilled = sum(_prefill(row, timing) for row in entering)
        self._count(len(decoding), num_committed, num_prefilled, timing)
        ended = [row for row in self._rows if row.num_done == len(row.script)]
        self._rows = [row for row in self._rows if row.num_done < len(row.script)]
        return [*(_completion(row) for row in ended), *refused]

    def _do_harm(self) -> list[Completion]:
        """What the live rows do besides being decoded; the completions of those refused."""
        refused = []
        for row in list(self._rows):
            match self._harm.get(row.key[0]):
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                case "hang":
                    while True:
                        self._sleep(1.0)
                case "refuse":
                    self._rows.remove(row)
                    refused.append(_refusal(row))
        return refused

    def _count(self, num_rows: int, decoded: int, prefilled: int, timing: StepTiming) -> None:
        self.totals = self.totals.plus(
            EngineTotals(
                num_steps=1,
                num_row_steps=num_rows,
                num_committed=decoded + prefilled,
                num_decoded=decoded,
                num_nodes=TOKENS_PER_STEP * num_rows,
                num_prefill_tokens=timing.prefill_tokens,
                step_seconds=self._step_seconds,
                predicted_seconds=self._step_seconds,
                plain_steps=1,
                plain_tokens=num_rows,
                plain_seconds=self._step_seconds,
                paired_tokens=TOKENS_PER_STEP * num_rows,
                paired_seconds=self._step_seconds,
            )
        )

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


def _prefill(row: _Row, timing: StepTiming) -> int:
    """Take a row in: its first token, or none if it only rebuilds a cache."""
    num_committed = 0 if row.num_done else 1
    _record(row, "prefill", num_committed, timing)
    return num_committed


def _advance(row: _Row, num_tokens: int, timing: StepTiming) -> int:
    """Commit up to so many tokens; how many it was."""
    num_committed = min(num_tokens, len(row.script) - row.num_done)
    _record(row, "bastion", num_committed, timing)
    row.num_steps += 1
    return num_committed


def _record(row: _Row, method: str, num_committed: int, timing: StepTiming) -> None:
    is_prefill = method == "prefill"
    row.records.append(
        StepRecord(
            timing=timing,
            method=method,
            context_length=len(row.request.prompt_ids) + row.num_done,
            num_nodes=0 if is_prefill else TOKENS_PER_STEP,
            tree_depth=0 if is_prefill else 1,
            top1_depth=0 if is_prefill else 1,
            num_accepted=0 if is_prefill else TOKENS_PER_STEP - 1,
            num_committed=num_committed,
            expected_tokens=1.0 if is_prefill else float(TOKENS_PER_STEP),
            expected_tokens_raw=1.0 if is_prefill else float(TOKENS_PER_STEP),
        )
    )
    row.num_done += num_committed


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
        num_steps=row.num_steps,
        records=tuple(row.records),
    )


def _refusal(row: _Row) -> Completion:
    return Completion(
        row_id=row.request.row_id,
        sample_index=row.request.sample_index,
        output_ids=row.script[: row.num_done],
        text="",
        finish_reason="error",
        fault=RowFault("out_of_memory", f"row of {row.num_done} tokens does not fit alone"),
        num_prompt_tokens=len(row.request.prompt_ids),
        num_steps=row.num_steps,
        records=tuple(row.records),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngines:
    """Builds scripted engines; the target must be named ``scripted``."""

    max_batch: int = 8
    step_seconds: float = 0.0
    harm: Mapping[str, Harm] = field(default_factory=dict)
    """What rows do, by `row_id`: see the module."""
    max_context: int = MAX_CONTEXT

    def check(self, job: JobConfig) -> TargetFiles:
        """The one target there is."""
        if job.model.target != "scripted":
            raise ModelError(f"target {job.model.target}: only 'scripted' has no model")
        return TargetFiles("scripted", Path(), "scripted-1")

    def known_probe(self, job: JobConfig) -> str | None:
        """There is no drafter."""
        return None

    def load_tokenizer(self, target: TargetFiles) -> LetterTokenizer:
        """One token per byte."""
        return LetterTokenizer()

    def auto_dtype(self, device: str) -> str:
        """There are no numbers to be of any."""
        return ScriptedInfo().dtype

    def build(self, job: JobConfig, device: str, share: NodeShare) -> ScriptedEngine:
        """An engine at this pace."""
        return ScriptedEngine(
            max_batch=self.max_batch,
            step_seconds=self.step_seconds,
            threads=share.num_threads,
            harm=self.harm,
            max_context=self.max_context,
        )
