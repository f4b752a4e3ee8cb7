"""What `bastion` decides: whether to draft, which rows, how deep, and how many nodes to verify.

Predictions choose the budget of a step. Whether drafting pays at all is judged by what steps took.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bastion_batch.core.budget import (
    BatchGates,
    Budget,
    DraftDepths,
    PlainProbes,
    RowGates,
    best_budget,
)
from bastion_batch.core.tree import Candidates, DraftTree, largest_trees
from bastion_batch.engine.books import load_of_chunks
from bastion_batch.engine.costs import DraftLoad, StepCosts
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Work

MAX_DELAY = 1.25
"""A step that took longer than predicted is judged as if by no more than this factor. One beside a
prompt, which is predicted less well, is judged as predicted."""


class _Trial(NamedTuple):
    """A drafted step whose outcome is not known yet."""

    num_live: int
    predicted_seconds: float
    plain_rate: float
    """Tokens per second without drafting."""
    max_delay: float
    """By what factor it may have taken longer than predicted and be judged by that."""


class Controller:
    """Weighs tokens against seconds.

    Args:
        costs: what passes take.
        max_depth: D.
    """

    def __init__(self, costs: StepCosts, max_depth: int) -> None:
        self._costs = costs
        self._batch_gates = BatchGates()
        self._row_gates = RowGates()
        self._plain_probes = PlainProbes()
        self._depths = DraftDepths(max_depth)
        self._num_live = 0
        self._trial: _Trial | None = None

    def places(self, rows: Sequence[Row], num_live: int) -> list[int]:
        """Which of the rows to draft in the coming step: none for a plain one. Ask once a step.

        Args:
            rows: all that decode.
            num_live: rows of the batch, those whose prompt is still being read included: a step
                beside a prompt is drafted where those before and after it are.
        """
        self._num_live = num_live
        if not self._batch_gates.wants_draft(num_live):
            self._plain_probes.postpone(num_live)
            return []
        if self._plain_probes.is_due(num_live, self._batch_gates.recent_gain(num_live)):
            return []
        return self._row_gates.wanting([row.key for row in rows])

    def depths(self, rows: Sequence[Row]) -> list[int]:
        """How deep to draft each of the rows."""
        return self._depths.of([row.key for row in rows])

    def budget(
        self,
        rows: Sequence[Row],
        candidates: Candidates,
        chunks: Sequence[Work],
        drafting_seconds: float,
    ) -> Budget:
        """How many nodes to verify for the whole batch.

        Args:
            rows: all that decode, drafted or not.
            candidates: best first.
            chunks: prompt in the same pass.
            drafting_seconds: predicted of the draft pass and what goes with it.
        """
        num_rows, other_seconds = len(rows), self._costs.other_seconds
        tokens_N = num_rows + np.arange(len(candidates) + 1.0)
        contexts = [row.context_length for row in rows]
        largest_N = 1 + largest_trees(candidates).astype(np.float64)
        load = self._costs.load_of_trees(tokens_N, largest_N, contexts)
        if chunks:
            load = load.plus(load_of_chunks(chunks))
        verify_seconds_N = self._costs.verify.seconds_of(load)
        beside = other_seconds + drafting_seconds
        hopeful_seconds_N = self._costs.verify.hopeful_seconds_of(load) + beside
        budget = best_budget(candidates.log_scores_N, num_rows, hopeful_seconds_N)
        step_seconds = float(verify_seconds_N[budget.num_nodes]) + beside
        budget = budget._replace(tokens_per_second=budget.expected_tokens / step_seconds)
        plain_seconds = (
            float(verify_seconds_N[0]) + other_seconds
            if chunks
            else self._costs.plain_step_seconds(num_rows, sum(contexts))
        )
        self._trial = _Trial(
            num_live=self._num_live,
            predicted_seconds=step_seconds,
            plain_rate=num_rows / plain_seconds,
            max_delay=1.0 if chunks else MAX_DELAY,
        )
        return budget

    def judge_rows(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], budget: Budget, load: DraftLoad
    ) -> None:
        """Learn how deep each drafted row is worth drafting, and whether it is.

        What a row gains is held against the tokens that drafting it costs the batch.
        """
        keys = [row.key for row in rows]
        self._depths.observe(keys, [max(tree.depths) for tree in trees])
        others = len(rows) // 2
        if not others:
            return
        share = 1 - others / len(rows)
        fewer = DraftLoad(
            round(share * load.num_positions),
            len(rows) - others,
            round(share * load.context_tokens),
        )
        saved_seconds = self._costs.draft_seconds(load) - self._costs.draft_seconds(fewer)
        cost = saved_seconds / others * budget.tokens_per_second
        self._row_gates.observe(keys, [tree.expected_tokens - 1 - cost for tree in trees])

    def judge(self, num_tokens: int, step_seconds: float) -> None:
        """Learn whether drafting paid, from what came of the step in the end.

        A step that was held up counts as no more than `MAX_DELAY` says. Does nothing after a step
        without a budget.

        Args:
            num_tokens: accepted and bonus tokens of all rows that decode.
            step_seconds: what the step took.
        """
        trial, self._trial = self._trial, None
        if trial is not None:
            seconds = min(step_seconds, trial.max_delay * trial.predicted_seconds)
            self._batch_gates.observe(trial.num_live, num_tokens / seconds, trial.plain_rate)
