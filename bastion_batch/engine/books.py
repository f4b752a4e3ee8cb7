"""The books of an engine: what a step was expected to take, what it took, and what it did."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bastion_batch.core.roofline import PassLoad
from bastion_batch.core.tree import ROOT_ONLY
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.step import Verified, Work
from bastion_batch.engine.totals import BaselineBursts
from bastion_batch.records import EngineTotals, Method, StepRecord, StepTiming


def load_of_chunks(chunks: Sequence[Work]) -> PassLoad:
    """What chunks of prompt add to a pass."""
    return PassLoad.packed(
        [len(chunk.token_ids) for chunk in chunks],
        [chunk.row.context_length for chunk in chunks],
        sum(chunk.num_logits for chunk in chunks),
    )


class StepPlan(NamedTuple):
    """What a step has to do and is expected to take."""

    method: Method
    is_burst: bool
    contexts: dict[int, int]
    """Tokens in the cache before the step, by row key."""
    num_decoding: int
    """Rows that decode; the others have prompt in the pass."""
    num_nodes: int
    prefill_tokens: int
    load: PassLoad
    verify_seconds: float
    step_seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return self.num_decoding + self.num_nodes + self.prefill_tokens

    @property
    def prefill_share(self) -> float:
        """The part of the pass that is prompt."""
        return self.prefill_tokens / self.num_tokens


class Books:
    """Predicts every step, learns what steps cost, and keeps records and totals.

    Args:
        costs: what passes take; corrected by every step without prompts.
        bursts: plain steps for comparison.
    """

    def __init__(self, costs: StepCosts, bursts: BaselineBursts) -> None:
        self.totals = EngineTotals()
        self._costs = costs
        self._bursts = bursts

    def plan(
        self, works: list[Work], method: Method, drafting_seconds: float, *, is_burst: bool
    ) -> StepPlan:
        """What a step over these works is expected to take.

        Args:
            works: of all rows in the pass.
            method: what the step does.
            drafting_seconds: predicted of drafting; 0 for a plain step.
            is_burst: whether it is plain for the sake of comparison.
        """
        contexts = {work.row.key: work.row.context_length for work in works}
        trees = [work for work in works if work.tree is not None]
        num_in_trees = sum(len(work.token_ids) for work in trees)
        load = self._load_of(trees, [work for work in works if work.tree is None])
        verify_seconds = float(self._costs.verify.seconds_of(load))
        return StepPlan(
            method=method,
            is_burst=is_burst,
            contexts=contexts,
            num_decoding=len(trees),
            num_nodes=num_in_trees - len(trees),
            prefill_tokens=int(load.num_tokens) - num_in_trees,
            load=load,
            verify_seconds=verify_seconds,
            step_seconds=verify_seconds + drafting_seconds + self._costs.other_seconds,
        )

    def learn(self, plan: StepPlan, seconds: dict[str, float], drafting_seconds: float) -> None:
        """Correct the latency models by a step that carried no prompts.

        Args:
            plan: the step's.
            seconds: of every stage, and of the ``step``.
            drafting_seconds: what drafting took of it, which the proposer learns from.
        """
        if plan.prefill_tokens:
            return
        self._costs.observe_verify(plan.load, seconds["verify"])
        self._costs.observe_other(seconds["step"] - seconds["verify"] - drafting_seconds)
        if plan.method == "ar":
            rows, contexts = plan.load.num_rows, plan.load.context_tokens
            self._costs.observe_plain_step(rows, contexts, seconds["step"])

    def enter(
        self,
        plan: StepPlan,
        seconds: dict[str, float],
        verified: list[Verified],
        kept: list[int],
        batch_size: int,
    ) -> None:
        """Add a step to the totals, and a record to every row that took part.

        Args:
            plan: the step's.
            seconds: of every stage, and of the ``step``.
            verified: what came of each row.
            kept: how many tokens each row committed.
            batch_size: live rows.
        """
        timing = StepTiming(
            step=self.totals.num_steps,
            method=plan.method,
            batch_size=batch_size,
            budget_nodes=plan.num_nodes,
            prefill_tokens=plan.prefill_tokens,
            predicted_verify_seconds=plan.verify_seconds,
            predicted_step_seconds=plan.step_seconds,
            **{f"{stage}_seconds": value for stage, value in seconds.items()},
        )
        for one, num_committed in zip(verified, kept, strict=True):
            row = one.work.row
            row.records.append(_record(one, num_committed, plan.contexts[row.key], timing))
        self._add_totals(plan, timing, verified, kept)

    def _load_of(self, trees: list[Work], chunks: list[Work]) -> PassLoad:
        if not trees:
            return load_of_chunks(chunks)
        sizes = [len(work.token_ids) for work in trees]
        load = self._costs.load_of_trees(
            np.asarray(sum(sizes), np.float64),
            np.asarray(max(sizes), np.float64),
            [work.row.context_length for work in trees],
        )
        return load.plus(load_of_chunks(chunks)) if chunks else load

    def _add_totals(
        self, plan: StepPlan, timing: StepTiming, verified: list[Verified], kept: list[int]
    ) -> None:
        decoded = [n for one, n in zip(verified, kept, strict=True) if one.work.tree is not None]
        step = EngineTotals(
            num_steps=1,
            num_row_steps=plan.num_decoding,
            num_committed=sum(kept),
            num_decoded=sum(decoded),
            num_accepted=sum(len(one.path) for one in verified),
            num_nodes=plan.num_nodes,
            num_prefill_tokens=plan.prefill_tokens,
            step_seconds=timing.step_seconds,
            predicted_seconds=plan.step_seconds,
        )
        self.totals = self.totals.plus(step)
        if not plan.prefill_tokens:
            baseline = self._bursts.end_step(
                plan.num_decoding, sum(decoded), timing.step_seconds, is_burst=plan.is_burst
            )
            self.totals = self.totals.plus(baseline)


def _record(
    verified: Verified, num_committed: int, context_length: int, timing: StepTiming
) -> StepRecord:
    tree = verified.work.tree or ROOT_ONLY
    commits = bool(verified.token_ids)
    return StepRecord(
        timing=timing,
        method=timing.method if verified.work.tree else "prefill",
        context_length=context_length,
        num_nodes=tree.num_nodes,
        tree_depth=max(tree.depths),
        top1_depth=tree.top1_depth,
        num_accepted=len(verified.path),
        num_committed=num_committed,
        expected_tokens=tree.expected_tokens if commits else 0.0,
        expected_tokens_raw=tree.expected_tokens_raw if commits else 0.0,
    )
