"""The decode engine: continuous batching of rows, one BASTION step at a time.

    engine = Engine.from_pretrained("smollm2-135m-instruct")
    for completion in engine.generate(requests):
        print(completion.text)

A step drafts, builds trees, verifies and commits, once for all live rows. Which rows those are is
`admission`'s business, what to verify `proposer`'s, the pass itself `step`'s, and what came of it
is entered in `books`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.engine.admission import Batch
from bastion_batch.engine.books import Books
from bastion_batch.engine.cache import Move
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.device import device_name, pick_device, pick_dtype
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.latency import calibrate
from bastion_batch.engine.memory import MemoryBudget, available_bytes
from bastion_batch.engine.probe_report import ProbeReport
from bastion_batch.engine.profiles import (
    DirectoryProfiles,
    Profile,
    ProfileKey,
    ProfileStore,
    acceptance_of,
    costs_of,
    profile_key,
)
from bastion_batch.engine.proposer import Proposer
from bastion_batch.engine.row import Row
from bastion_batch.engine.sizing import choose_bounds, prompt_room
from bastion_batch.engine.step import PassLayout, PassResult, Verified, Work, verify
from bastion_batch.engine.target import Target
from bastion_batch.engine.totals import BaselineBursts, EngineTotals, StageClock
from bastion_batch.engine.transfer import to_device
from bastion_batch.records import Completion, Exported, Method, Request, RowFault, RowKey

MEMORY_SHARE = 0.8
"""Of the memory that is left once the models are loaded, for caches and passes."""


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
    probe: dict[str, Any] | None = None
    """What the drafter's probe found; None if there was none."""


class Engine:
    """Decodes requests with one target on one device. Not thread-safe.

    Hand it all requests with `generate`, or feed it with `add` and drive it with `step`. The text
    of a request depends on the target, its prompt, its sampling and its noise key, and on nothing
    else: not on method, batch, memory, or the engine it began in.

    Args:
        target: the model whose distribution is sampled.
        drafter: proposes candidates, or None to decode plainly.
        tokenizer: for text and stop strings; without one completions carry ids only.
        method: how candidates are kept; it changes the speed and never the text.
        nodes_per_row: of `ddtree`.
        max_nodes: most drafted nodes of one pass.
        max_batch: most live rows; ``auto``: as many as make decoding clearly faster by the
            latency model, and fit into memory. Beyond what fits, rows wait.
        memory_bytes: what caches and passes may take beside the models; None: a share of what is
            left now on the device, within the limits of the process's control groups.
        costs: latency models; measured now if None.
        acceptance: what is known of the drafter; None begins with nothing learnt.
        baseline_bursts: decode plainly for 2 % of the steps, to measure the speedup.
        layout: how a pass suits the device, its own if None; it changes the speed and never the
            text.
        names: how target and drafter are called in `info`.
        probe: what the drafter's probe found, for `info`.

    Raises:
        ValueError: `max_batch` is below 1, or the memory does not hold one pass.
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
        max_batch: int | Literal["auto"] = "auto",
        memory_bytes: int | None = None,
        costs: StepCosts | None = None,
        acceptance: AcceptanceModel | None = None,
        baseline_bursts: bool = False,
        layout: PassLayout | None = None,
        names: tuple[str, str | None] = ("", None),
        probe: ProbeReport | None = None,
    ) -> None:
        if max_batch != "auto" and max_batch < 1:
            raise ValueError(f"max_batch {max_batch} is below 1")
        self.target = target
        self.drafter = drafter = None if method == "ar" else drafter
        self.tokenizer = tokenizer
        self._names = names
        self._probe = probe
        self._layout = layout or PassLayout.of(target.device, target.dtype)
        self._profile_key: ProfileKey | None = None
        self._profiles: ProfileStore = DirectoryProfiles()
        self._num_added = 0
        self._late_seconds = 0.0
        with torch.inference_mode():
            self._costs = costs or calibrate(target, drafter)
        self._cache = target.new_cache()
        caches = (self._cache, *(drafter.caches if drafter else ()))
        if memory_bytes is None:
            memory_bytes = int(MEMORY_SHARE * available_bytes(target.device))
        bounds = choose_bounds(
            memory_bytes,
            None if max_batch == "auto" else max_batch,
            self._costs,
            nodes_in_all=max_nodes if drafter else 0,
            nodes_per_row=max(nodes_per_row, drafter.depth) if drafter else 0,
            bytes_per_token=sum(cache.bytes_per_token for cache in caches),
            bytes_per_row=drafter.pending_bytes_per_row if drafter else 0,
        )
        MemoryBudget(bounds.cache_bytes, caches)
        self.max_batch = bounds.max_rows
        self._batch = Batch(self._cache, drafter, self.max_batch)
        self._bursts = BaselineBursts(enabled=baseline_bursts and drafter is not None)
        self._books = Books(self._costs, self._bursts)
        self._proposer = Proposer(
            drafter,
            method if drafter is not None else "ar",
            self._costs,
            end_ids=target.ids.end,
            vocab_size=target.ids.vocab_size,
            max_context=self.max_context,
            nodes_per_row=nodes_per_row,
            max_nodes=max_nodes,
            acceptance=acceptance,
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
        max_batch: int | Literal["auto"] = "auto",
        memory_share: float = MEMORY_SHARE,
        threads: int | str = "auto",
        baseline_bursts: bool = False,
        profile: bool = True,
        probe: bool = True,
        profiles: ProfileStore | None = None,
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
            max_batch: see `Engine`.
            memory_share: the part of the free memory that caches and passes may take.
            threads: CPU threads of this process; ``auto`` leaves them as they are.
            baseline_bursts: see `Engine`.
            profile: begin with what an earlier engine like this one learnt, if it is on file.
            probe: hold the drafter against the target's own text, once on this machine.
            profiles: where that is, and where what this one measures goes; this machine's own
                if None.

        Raises:
            ModelError: a checkpoint cannot be found, loaded, or verified as a tree, or a drafter
                is better read in another way than it says.
            ValueError: see `Engine`.
        """
        from bastion_batch.engine.pretrained import load_pretrained

        if threads != "auto":
            torch.set_num_threads(int(threads))
        torch.set_float32_matmul_precision("highest")
        where = pick_device(device)
        loaded = load_pretrained(
            target,
            None if method == "ar" else drafter,
            revision=revision,
            dtype=pick_dtype(dtype, where),
            device=where,
            probe=probe,
        )
        model, draft = loaded.target, loaded.drafter
        key = profile_key(model, *loaded.digests) if profile else None
        profiles = profiles or DirectoryProfiles()
        known = profiles.load(key) if key else None
        engine = cls(
            model,
            draft,
            tokenizer=loaded.tokenizer,
            method=method,
            nodes_per_row=nodes_per_row,
            max_nodes=max_nodes,
            max_batch=max_batch,
            memory_bytes=int(memory_share * available_bytes(where)),
            costs=costs_of(known, model, draft) if known else None,
            acceptance=acceptance_of(known, draft.depth) if known and draft else None,
            baseline_bursts=baseline_bursts,
            names=loaded.names,
            probe=loaded.probe,
        )
        engine._profile_key, engine._profiles = key, profiles
        return engine

    def save_profile(self) -> None:
        """Keep what was learnt, for the next engine like this one.

        Does nothing where `from_pretrained` did not make the engine, or made it without a profile.
        """
        if self._profile_key is not None:
            learnt = self._proposer.acceptance.to_dict() if self.drafter else None
            costs = self._costs.to_dict()
            self._profiles.save(Profile(key=self._profile_key, costs=costs, acceptance=learnt))

    # What it holds

    @property
    def method(self) -> Method:
        """How candidates are kept."""
        return self._proposer.method

    @property
    def totals(self) -> EngineTotals:
        """Running sums over all steps."""
        return self._books.totals

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place: not yet started, or interrupted for want of memory."""
        return self._batch.num_waiting

    @property
    def num_running(self) -> int:
        """Live rows."""
        return len(self._batch.live)

    def num_tokens(self) -> dict[RowKey, int]:
        """Output tokens so far of every row that it holds, live or waiting."""
        return self._batch.num_tokens()

    @property
    def num_requeued(self) -> int:
        """Times that a live row went back to the queue for want of memory."""
        return self._batch.num_requeued

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._batch.has_work

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
            probe=self._probe.to_dict() if self._probe else None,
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

    def add(self, request: Request | Exported) -> None:
        """Queue a request, or a row that another engine has exported.

        A request that has ended already, by a stop, an end token or a limit among its
        `generated_ids`, is answered by the next step without being decoded.

        Raises:
            ValueError: its tokens or its sampling do not fit the target, or it has stop strings
                and there is no tokenizer.
        """
        self._enqueue(request)

    @torch.inference_mode()
    def export(self, row_id: str, sample_index: int = 0) -> Exported:
        """Take a row out, waiting or live, so that another engine may end it with the same text.

        Raises:
            ValueError: there is no such row.
        """
        row = self._batch.take(row_id, sample_index)
        if row is None:
            raise ValueError(f"row {row_id}, sample {sample_index}: neither waiting nor live")
        return row.exported()

    def generate(self, requests: Iterable[Request | Exported]) -> Iterator[Completion]:
        """Decode all requests; completions come in the order in which they finish.

        Requests are taken from the iterable as places become free, at most `max_batch` ahead, so
        there may be any number of them. Whoever leaves early drops those that are not finished.

        Raises:
            ValueError: a request cannot be decoded: see `add`. It ends the generator.
        """
        coming = iter(requests)
        unfinished: list[Row] = []
        try:
            while True:
                unfinished.extend(self._take_from(coming))
                if not self.has_work:
                    return
                yield from self.step()
                unfinished = [row for row in unfinished if row.finish_reason is None]
        finally:
            with torch.inference_mode():
                self._batch.drop({row.key for row in unfinished})

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draft, build, verify and commit once for all live rows; returns what has ended."""
        clock = StageClock(self._late_seconds)
        batch = self._batch
        batch.admit()
        rows = batch.decoding()
        chunks = self._prompt_chunks(rows)
        with clock.stage("draft"):
            is_burst = self._bursts.begin_step(len(rows), has_prompts=bool(chunks))
            num_prefilling = len(batch.live) - len(rows)
            proposal = None if is_burst else self._proposer.draft(rows, num_prefilling)
        with clock.stage("build"):
            forest = self._proposer.grow(rows, proposal, chunks)
            works = batch.make_room([*forest.works(), *chunks])
        if not works:
            return self._retire()
        with clock.stage("build"):
            method = self.method if forest.drafted else "ar"
            plan = self._books.plan(
                works, method, forest.predicted_drafting_seconds, is_burst=is_burst
            )
        with clock.stage("verify"):
            result = verify(self.target, self._cache, works, self._taps, self._layout)
        with clock.stage("commit"):
            kept = self._commit(result.verified)
            self._proposer.learn(result.verified)
        with clock.stage("draft"):
            self._observe_taps(result)
            batch.share_prompts()
        seconds = clock.finish(plan.prefill_share)
        self._books.learn(plan, seconds, forest.drafting_seconds)
        self._proposer.judge(seconds["step"])
        self._books.enter(plan, seconds, result.verified, kept, len(batch.live))
        ended = self._retire()
        self._late_seconds = clock.late_seconds
        return ended

    def check_integrity(self) -> None:
        """Assert that rows and caches agree; for tests and idle moments."""
        self._batch.check()

    # The stages

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter else ()

    def _require_decodable(self, request: Request) -> None:
        fault = self.check(len(request.prompt_ids))
        if fault is not None:
            raise ValueError(f"request {request.row_id}: {fault.message}")
        token_ids = (*request.prompt_ids, *request.generated_ids)
        vocab_size = self.target.ids.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(
                f"request {request.row_id}: token ids from {min(token_ids)} to {max(token_ids)}; "
                f"the target's vocabulary has {vocab_size}"
            )
        unusable = request.sampling.fault(vocab_size, self.target.ids.end)
        if unusable is not None:
            raise ValueError(f"request {request.row_id}: {unusable}")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"request {request.row_id}: stop strings need a tokenizer")

    def _enqueue(self, request: Request | Exported) -> Row:
        coming = request if isinstance(request, Exported) else Exported(request)
        self._require_decodable(coming.request)
        row = Row(coming.request, self._num_added, self.target.ids.end, self.tokenizer)
        self._num_added += 1
        row.records.extend(coming.records)
        row.num_steps = coming.num_steps
        row.commit(coming.request.generated_ids, self.max_context)
        self._batch.queue(row)
        return row

    def _take_from(self, coming: Iterator[Request | Exported]) -> Iterator[Row]:
        """Queue what comes while there is room in the queue."""
        while self.num_waiting < self.max_batch:
            request = next(coming, None)
            if request is None:
                return
            yield self._enqueue(request)

    def _prompt_chunks(self, decoding: list[Row]) -> list[Work]:
        """Prompt tokens for the coming pass."""
        live = self._batch.live
        num_prefilling = len(live) - len(decoding)
        if not num_prefilling:
            return []
        context = sum(row.context_length for row in live)
        room = prompt_room(self._costs, len(decoding), num_prefilling, context)
        return self._batch.prompt_chunks(room)

    def _commit(self, verified: list[Verified]) -> list[int]:
        """Keep the accepted tokens and their cache entries; returns how many each row kept."""
        moves = []
        for one in verified:
            row = one.work.row
            assert row.slot is not None
            moves.append(Move(row.slot, one.cached))
            row.num_steps += one.work.tree is not None
        self._cache.commit(moves)
        return [one.work.row.commit(one.token_ids, self.max_context) for one in verified]

    def _observe_taps(self, result: PassResult) -> None:
        """Give the drafter the taps of every token that became context, of rows that go on.

        And of every prompt, for the samples that wait for it even if this one has ended.
        """
        if self.drafter is None or result.taps_SF is None:
            return
        wanted = [
            v for v in result.verified if v.work.row.finish_reason is None or v.work.tree is None
        ]
        if not wanted:
            return
        tokens = [v.first_token + offset for v in wanted for offset in v.cached]
        self.drafter.observe(
            [v.work.row.key for v in wanted],
            [len(v.cached) for v in wanted],
            _rows_of(result.taps_SF, tokens),
        )

    def _retire(self) -> list[Completion]:
        """Completions of the rows that have ended; an engine without work is left tidy."""
        completions = [row.completion() for row in self._batch.retire()]
        if not self.has_work:
            self._batch.trim()
            self.check_integrity()
        return completions


def _rows_of(features_SF: Tensor, tokens: Sequence[int]) -> Tensor:
    if len(tokens) == len(features_SF):
        return features_SF
    return features_SF[to_device(np.array(tokens), features_SF.device)]
