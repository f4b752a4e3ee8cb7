"""The decode engine: continuous batching of rows, one BASTION step at a time."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bastion_batch.core.tree import ROOT_ONLY
from bastion_batch.engine.cache import Move
from bastion_batch.engine.device import default_max_batch, device_name, pick_device, pick_dtype
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.latency import StepCosts, calibrate
from bastion_batch.engine.proposer import Forest, Proposer
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import PassResult, Verified, Work, verify
from bastion_batch.engine.target import Target
from bastion_batch.engine.totals import BaselineBursts, EngineTotals, StageClock
from bastion_batch.records import Completion, Method, Request, RowFault, StepRecord, StepTiming

MAX_PREFILL_TOKENS = 512
"""Prompt tokens that enter one pass, over all rows."""


class EngineInfo(NamedTuple):
    """What an engine is, for reports; JSON-able."""

    device: str
    device_type: str
    dtype: str
    threads: int
    target: str
    drafter: str | None
    method: str
    max_batch: int
    calibration: dict[str, Any]


class _Prediction(NamedTuple):
    """What a step has to do and is expected to take."""

    contexts: dict[int, int]
    """Tokens in the cache before the step, by row key."""
    num_tokens: int
    prefill_tokens: int
    verify_seconds: float
    step_seconds: float

    @property
    def prefill_share(self) -> float:
        """The part of the pass that is prompt."""
        return self.prefill_tokens / self.num_tokens


class Engine:
    """Decodes requests with one target on one device. Not thread-safe.

    Feed it with `add` and drive it with `step`, or hand it everything with `generate`.

    Args:
        target: the model whose distribution is sampled.
        drafter: proposes candidates, or None to decode plainly.
        tokenizer: for text and stop strings; without one completions carry ids only.
        method: how candidates are kept; it changes the speed and never the text.
        nodes_per_row: of `ddtree`.
        max_nodes: most drafted nodes of one pass.
        max_batch: most live rows.
        costs: latency models; measured now if None.
        baseline_bursts: decode plainly for 2 % of the steps, to measure the speedup.
        names: how target and drafter are called in `info`.

    Raises:
        ValueError: `max_batch` is below 1.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401 - any transformers tokenizer
        method: Method = "bastion",
        nodes_per_row: int = 16,
        max_nodes: int = 512,
        max_batch: int = 16,
        costs: StepCosts | None = None,
        baseline_bursts: bool = False,
        names: tuple[str, str | None] = ("", None),
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch {max_batch} is below 1")
        self.target = target
        self.drafter = None if method == "ar" else drafter
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.totals = EngineTotals()
        self._names = names
        self._cache = target.new_cache()
        self._bursts = BaselineBursts(enabled=baseline_bursts and self.drafter is not None)
        self._waiting: deque[Row] = deque()
        self._live: list[Row] = []
        self._num_added = 0
        self._late_seconds = 0.0
        with torch.inference_mode():
            self._costs = costs or calibrate(target, self.drafter)
        self._proposer = Proposer(
            self.drafter,
            method if self.drafter is not None else "ar",
            self._costs,
            end_ids=target.ids.end,
            max_context=self.max_context,
            nodes_per_row=nodes_per_row,
            max_nodes=max_nodes,
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = "default",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        method: Method = "bastion",
        nodes_per_row: int = 16,
        max_nodes: int = 512,
        max_batch: int | str = "auto",
        threads: int | str = "auto",
        baseline_bursts: bool = False,
    ) -> "Engine":
        """Load a target and its drafter and measure the device.

        Args:
            target: built-in name, checkpoint directory or hub id.
            drafter: ``default`` for the one built in for the target, directory, hub id, or None.
            revision: of a hub target.
            dtype: ``auto``: bfloat16 on CUDA and on CPUs with bfloat16 units, else float32.
            device: ``auto``: CUDA if there is one.
            method: see `Engine`.
            nodes_per_row: see `Engine`.
            max_nodes: see `Engine`.
            max_batch: ``auto``: 16 on a CPU, 64 on CUDA.
            threads: CPU threads of this process; ``auto`` leaves them as they are.
            baseline_bursts: see `Engine`.

        Raises:
            ModelError: a checkpoint cannot be found, loaded, or verified as a tree.
        """
        from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target

        if threads != "auto":
            torch.set_num_threads(int(threads))
        torch.set_float32_matmul_precision("highest")
        where = pick_device(device)
        files = resolve_target(target, revision)
        draft_files = None if method == "ar" else resolve_drafter(drafter, target)
        model = Target.load(files.path, pick_dtype(dtype, where), where)
        return cls(
            model,
            DFlashDrafter.load(draft_files.path, model) if draft_files else None,
            tokenizer=load_tokenizer(files.path),
            method=method,
            nodes_per_row=nodes_per_row,
            max_nodes=max_nodes,
            max_batch=default_max_batch(where) if max_batch == "auto" else int(max_batch),
            baseline_bursts=baseline_bursts,
            names=(files.name, draft_files.name if draft_files else None),
        )

    # What it holds

    @property
    def method(self) -> Method:
        """How candidates are kept."""
        return self._proposer.method

    @property
    def num_waiting(self) -> int:
        """Requests not yet started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Live rows."""
        return len(self._live)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._live)

    @property
    def max_context(self) -> int:
        """Most tokens of a row, prompt and output together."""
        return self.target.stack.config.max_positions

    @property
    def info(self) -> EngineInfo:
        """What this engine is and what it has learnt about its device."""
        target = self.target
        return EngineInfo(
            device=device_name(target.device),
            device_type=target.device.type,
            dtype=str(target.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            target=self._names[0],
            drafter=self._names[1],
            method=self.method,
            max_batch=self.max_batch,
            calibration=self._costs.summary(),
        )

    def check(self, num_prompt_tokens: int) -> RowFault | None:
        """Why a prompt of this length cannot be decoded, or None if it can."""
        if num_prompt_tokens < 1:
            return RowFault("empty_prompt", "the prompt has no tokens")
        if num_prompt_tokens >= self.max_context:
            return RowFault(
                "prompt_too_long",
                f"prompt of {num_prompt_tokens} tokens leaves no room in the target's context "
                f"of {self.max_context}",
            )
        return None

    # Driving it

    def use(self, method: Method, nodes_per_row: int = 16) -> None:
        """Decode by another method from the next step on, live rows included: same text.

        Raises:
            ValueError: the method drafts and this engine has no drafter.
        """
        if method != "ar" and self.drafter is None:
            raise ValueError(f"method {method} needs a drafter, and this engine has none")
        self._proposer.use(method, nodes_per_row)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its tokens do not fit the target, it is complete already, or it has stop
                strings and there is no tokenizer.
        """
        token_ids = (*request.prompt_ids, *request.generated_ids)
        fault = self.check(len(token_ids))
        if fault is not None:
            raise ValueError(f"request {request.row_id}: {fault.message}")
        vocab_size = self.target.ids.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(
                f"request {request.row_id}: token ids from {min(token_ids)} to {max(token_ids)}; "
                f"the target's vocabulary has {vocab_size}"
            )
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"request {request.row_id}: stop strings need a tokenizer")
        if len(request.generated_ids) >= request.sampling.max_new_tokens:
            raise ValueError(
                f"request {request.row_id}: {len(request.generated_ids)} tokens are generated; "
                f"max_new_tokens is {request.sampling.max_new_tokens}"
            )
        row = Row(request, self._num_added, self.target.ids.end, self.tokenizer)
        self._num_added += 1
        self._waiting.append(row)

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode all requests; completions come as they finish."""
        for request in requests:
            self.add(request)
        while self.has_work:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draft, build, verify and commit once for all live rows; returns what has ended."""
        clock = StageClock(self._late_seconds)
        self._admit()
        if not self._live:
            return []
        chunks = self._prompt_chunks()
        rows = [row for row in self._live if not row.is_prefilling]
        with clock.stage("draft"):
            is_burst = self._bursts.begin_step(len(rows), has_prompts=bool(chunks))
            marginals = None if is_burst else self._proposer.draft(rows)
        with clock.stage("build"):
            forest = self._proposer.grow(rows, marginals)
            works = self._reserve([*forest.works(), *chunks])
            predicted = self._predict(works, drafted=forest.drafted)
        with clock.stage("verify"):
            result = verify(self.target, self._cache, works, self._taps)
        with clock.stage("commit"):
            kept = [self._commit(verified) for verified in result.verified]
            self._proposer.learn(result.verified)
        pass_seconds = clock.seconds("draft")
        with clock.stage("draft"):
            self._observe_taps(result)
        seconds = clock.finish(predicted.prefill_share)
        self._learn_costs(seconds, pass_seconds, forest, predicted)
        timing = self._timing(seconds, forest, predicted)
        self._add_totals(timing, result, kept, is_burst=is_burst)
        self._record(result, kept, predicted, timing)
        ended = self._retire()
        self._late_seconds = clock.late_seconds
        return ended

    def check_integrity(self) -> None:
        """Assert that rows and cache agree; for tests and idle moments."""
        self._cache.check()
        assert self._cache.num_open == len(self._live)
        for row in self._live:
            assert row.slot is not None
            assert row.context_length <= len(row.token_ids)

    # The stages

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter else ()

    def _admit(self) -> None:
        while self._waiting and len(self._live) < self.max_batch:
            row = self._waiting.popleft()
            row.slot = self._cache.open(len(row.token_ids) + 1)
            self._live.append(row)

    def _prompt_chunks(self) -> list[Work]:
        """Prompt tokens for the coming pass, first come first served."""
        room = MAX_PREFILL_TOKENS
        chunks = []
        for row in self._live:
            if not row.is_prefilling or room <= 0:
                continue
            start = row.context_length
            stop = min(row.prefill_end, start + room)
            chunks.append(Work(row, row.token_ids[start:stop], None))
            room -= stop - start
        return chunks

    def _reserve(self, works: list[Work]) -> list[Work]:
        for work in works:
            assert work.row.slot is not None
            self._cache.reserve(work.row.slot, len(work.token_ids))
        return works

    def _commit(self, verified: Verified) -> int:
        """Keep the accepted tokens and their cache entries; returns how many were kept."""
        row = verified.work.row
        assert row.slot is not None
        self._cache.commit([Move(row.slot, verified.cached)])
        if verified.work.tree is not None:
            row.num_steps += 1
        return row.commit(verified.token_ids, self.max_context)

    def _observe_taps(self, result: PassResult) -> None:
        """Give the drafter the taps of every token that became context."""
        if self.drafter is None or result.taps_SF is None:
            return
        going_on = [v for v in result.verified if v.work.row.finish_reason is None]
        if not going_on:
            return
        tokens = [v.first_token + offset for v in going_on for offset in v.cached]
        self.drafter.observe(
            [v.work.row.key for v in going_on],
            [len(v.cached) for v in going_on],
            _rows_of(result.taps_SF, tokens),
        )

    # The books

    def _predict(self, works: list[Work], *, drafted: bool) -> _Prediction:
        contexts = {work.row.key: work.row.context_length for work in works}
        chunks = [work for work in works if work.tree is None]
        num_tokens = sum(len(work.token_ids) for work in works)
        num_drafted = len(works) - len(chunks) if drafted else 0
        context = sum(contexts.values())
        drafted_context = context - sum(contexts[chunk.row.key] for chunk in chunks)
        verify_seconds = self._costs.verify.seconds(num_tokens, len(works), context)
        return _Prediction(
            contexts=contexts,
            num_tokens=num_tokens,
            prefill_tokens=sum(len(chunk.token_ids) for chunk in chunks),
            verify_seconds=verify_seconds,
            step_seconds=verify_seconds
            + self._costs.draft_seconds(num_drafted, drafted_context)
            + self._costs.other_seconds,
        )

    def _learn_costs(
        self,
        seconds: dict[str, float],
        draft_pass_seconds: float,
        forest: Forest,
        predicted: _Prediction,
    ) -> None:
        """Correct the latency models by a step that carried no prompts."""
        if predicted.prefill_tokens:
            return
        num_rows, context = len(forest.rows), sum(predicted.contexts.values())
        self._costs.verify.observe(predicted.num_tokens, num_rows, context, seconds["verify"])
        if forest.drafted:
            self._costs.observe_draft(num_rows, context, draft_pass_seconds)
        passes = seconds["verify"] + draft_pass_seconds
        self._costs.observe_other(seconds["step"] - passes)

    def _timing(
        self, seconds: dict[str, float], forest: Forest, predicted: _Prediction
    ) -> StepTiming:
        return StepTiming(
            step=self.totals.num_steps,
            method=self.method if forest.drafted else "ar",
            batch_size=len(self._live),
            budget_nodes=forest.num_nodes,
            prefill_tokens=predicted.prefill_tokens,
            predicted_verify_seconds=predicted.verify_seconds,
            predicted_step_seconds=predicted.step_seconds,
            **{f"{stage}_seconds": value for stage, value in seconds.items()},
        )

    def _add_totals(
        self,
        timing: StepTiming,
        result: PassResult,
        kept: list[int],
        *,
        is_burst: bool,
    ) -> None:
        pairs = list(zip(result.verified, kept, strict=True))
        num_rows = sum(verified.work.tree is not None for verified, _ in pairs)
        num_decoded = sum(count for verified, count in pairs if verified.work.tree is not None)
        step = EngineTotals(
            num_steps=1,
            num_row_steps=num_rows,
            num_committed=sum(kept),
            num_decoded=num_decoded,
            num_accepted=sum(len(verified.path) for verified in result.verified),
            num_nodes=timing.budget_nodes,
            num_prefill_tokens=timing.prefill_tokens,
            step_seconds=timing.step_seconds,
        )
        self.totals = self.totals.plus(step)
        if not timing.prefill_tokens:
            baseline = self._bursts.end_step(
                num_rows, num_decoded, timing.step_seconds, is_burst=is_burst
            )
            self.totals = self.totals.plus(baseline)

    def _record(
        self,
        result: PassResult,
        kept: list[int],
        predicted: _Prediction,
        timing: StepTiming,
    ) -> None:
        for verified, num_committed in zip(result.verified, kept, strict=True):
            row, tree = verified.work.row, verified.work.tree or ROOT_ONLY
            commits = bool(verified.token_ids)
            row.records.append(
                StepRecord(
                    timing=timing,
                    method=timing.method if verified.work.tree else "prefill",
                    context_length=predicted.contexts[row.key],
                    num_nodes=tree.num_nodes,
                    tree_depth=max(tree.depths),
                    top1_depth=tree.top1_depth,
                    num_accepted=len(verified.path),
                    num_committed=num_committed,
                    expected_tokens=tree.expected_tokens if commits else 0.0,
                    expected_tokens_raw=tree.expected_tokens_raw if commits else 0.0,
                )
            )

    def _retire(self) -> list[Completion]:
        ended = [row for row in self._live if row.finish_reason is not None]
        for row in ended:
            assert row.slot is not None
            self._cache.close(row.slot)
            row.slot = None
            if self.drafter is not None:
                self.drafter.forget(row.key)
        if ended:
            self._live = [row for row in self._live if row.finish_reason is None]
        return [row.completion() for row in ended]


def _rows_of(features_SF: Tensor, tokens: Sequence[int]) -> Tensor:
    if len(tokens) == len(features_SF):
        return features_SF
    return features_SF[torch.tensor(tokens, device=features_SF.device)]
