"""What to verify next: proposals from the drafter, and the method's stopping rule on them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.acceptance import AcceptanceModel, outcomes_of, sampling_group
from bastion_batch.core.budget import Budget
from bastion_batch.core.tree import (
    ROOT_ONLY,
    Candidates,
    DraftTree,
    best_first,
    plant,
    take_first,
    take_per_row,
    token_ids_of,
)
from bastion_batch.core.vocabulary import DraftVocabulary
from bastion_batch.engine.candidates import Ranking, Search
from bastion_batch.engine.controller import Controller
from bastion_batch.engine.costs import DraftLoad, StepCosts
from bastion_batch.engine.drafters import ConditionalScores, Drafter, DraftRow
from bastion_batch.engine.limits import Allowed, allowed
from bastion_batch.engine.overheads import DraftOverheads
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Verified, Work
from bastion_batch.records import Method

MAX_NODES_PER_ROW = 128
"""Candidates looked at per row by `bastion`; a wider search costs time and finds no use."""

MIN_CANDIDATES = 64
"""Candidates looked at in any step of `bastion`."""


class Proposal(NamedTuple):
    """What the drafter proposes for some rows, and what that took."""

    places: list[int]
    """Of the rows that were drafted, among all that decode."""
    allowed: Allowed
    """Of those rows."""
    candidates: Candidates | None
    """Of those rows, where the drafter had to be asked for them; else `grow` finds them."""
    load: DraftLoad
    is_caught_up: bool
    """Whether the drafter had kept up with the rows: only the last step's tokens were new to it."""
    catch_up_seconds: float
    pass_seconds: float
    """Of the pass, and of asking for candidates."""
    predicted_seconds: float
    """Of the same."""


class Forest(NamedTuple):
    """The trees of a step."""

    rows: list[Row]
    trees: list[DraftTree]
    token_ids: list[list[int]]
    """Root and nodes of each."""
    drafted: bool
    """Whether the drafter was run, however few nodes came of it."""
    drafting_seconds: float = 0.0
    """What a plain step would not have taken so far: catching up, the draft pass, the trees."""
    predicted_drafting_seconds: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Drafted nodes over all rows."""
        return sum(tree.num_nodes for tree in self.trees)

    def works(self) -> list[Work]:
        """What the rows contribute to the pass."""
        return [Work(*work) for work in zip(self.rows, self.token_ids, self.trees, strict=True)]


class Proposer:
    """Runs the drafter when it pays, for the rows for which it does, and grows the method's trees.

    Args:
        drafter: None to decode plainly.
        method: `ar` none, `dflash` the top-1 chain, `ddtree` the best of every row, `bastion` the
            best of the batch, as many as make the step fastest per token.
        costs: what passes take; learns from the draft passes.
        end_ids: tokens after which nothing can follow.
        vocab_size: token ids of the target.
        max_context: most tokens of a row.
        nodes_per_row: of `ddtree`.
        max_nodes: of a pass, for `bastion`.
        acceptance: what `bastion` scores candidates by; None begins with nothing learnt.
        calibrated: False scores candidates by the drafter's own probabilities, for comparison.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        method: Method,
        costs: StepCosts,
        *,
        end_ids: frozenset[int],
        vocab_size: int,
        max_context: int,
        nodes_per_row: int,
        max_nodes: int,
        acceptance: AcceptanceModel | None = None,
        calibrated: bool = True,
    ) -> None:
        self._drafter = drafter
        self._conditional = drafter if isinstance(drafter, ConditionalScores) else None
        self._method = method
        self._costs = costs
        self._end_ids = end_ids
        self._max_context = max_context
        self._nodes_per_row = nodes_per_row
        self._max_nodes = max_nodes
        self._calibrated = calibrated
        self._controller = Controller(costs, drafter.depth if drafter else 1)
        self._vocabulary = DraftVocabulary(vocab_size)
        self._overheads = DraftOverheads()
        self._excused_seconds = 0.0
        self._num_tokens = 0
        self._last_budget = 0
        self.acceptance = acceptance or AcceptanceModel(drafter.depth if drafter else 1)
        if drafter is not None:  # compiles where that has not been done: not in a step
            best_first(np.zeros((1, 1, 1), np.float32), np.ones(1, np.intp), 1)

    @property
    def method(self) -> Method:
        """How candidates are kept."""
        return self._method

    def use(self, method: Method, nodes_per_row: int) -> None:
        """Keep candidates by another method from the next step on."""
        self._method = method
        self._nodes_per_row = nodes_per_row

    def draft(self, rows: list[Row], num_prefilling: int = 0) -> Proposal | None:
        """Proposals for the rows for which drafting pays, or None for a plain step.

        Args:
            rows: all that decode.
            num_prefilling: live rows whose prompt is still being read.
        """
        if self._drafter is None or self._method == "ar" or not rows:
            return None
        places = list(range(len(rows)))
        if self._method == "bastion":
            places = self._controller.places(rows, len(rows) + num_prefilling)
        return self._run(self._drafter, rows, places) if places else None

    def _run(self, drafter: Drafter, rows: list[Row], places: list[int]) -> Proposal:
        drafted = [rows[place] for place in places]
        keys = [row.key for row in drafted]
        is_caught_up = all(drafter.num_pending(key) <= drafter.depth + 1 for key in keys)
        start = time.perf_counter()
        drafter.catch_up(keys)
        caught_up = time.perf_counter()
        depths = self._depths_of(drafter, drafted)
        marginals = drafter.draft(
            [
                DraftRow(row.key, row.token_ids, depth)
                for row, depth in zip(drafted, depths, strict=True)
            ]
        )
        possible = candidates = None
        if self._conditional is not None:
            possible = allowed(marginals, drafted, self._end_ids, keep_places=True)
            candidates = self._search(marginals.log_probs_RDK.shape).asking(
                self._conditional, possible, np.array(depths), self._ranking(drafted)
            )
        pass_seconds = time.perf_counter() - caught_up
        context = sum(row.context_length for row in drafted)
        load = DraftLoad(sum(depths), len(drafted), context)
        predicted_seconds = self._costs.draft_seconds(load)
        self._costs.observe_draft(load, pass_seconds)
        return Proposal(
            places=places,
            allowed=possible or allowed(marginals, drafted, self._end_ids),
            candidates=candidates,
            load=load,
            is_caught_up=is_caught_up,
            catch_up_seconds=caught_up - start,
            pass_seconds=pass_seconds,
            predicted_seconds=predicted_seconds,
        )

    def _depths_of(self, drafter: Drafter, rows: list[Row]) -> list[int]:
        """Positions in which each row's tree may have a node."""
        longest = [min(drafter.depth, row.max_tree_depth(self._max_context)) for row in rows]
        if self._method == "bastion":
            wanted = self._controller.depths(rows)
        else:
            most = drafter.depth if self._method == "dflash" else self._nodes_per_row
            wanted = [most] * len(rows)
        return [min(pair) for pair in zip(longest, wanted, strict=True)]

    def grow(
        self, rows: list[Row], proposal: Proposal | None, chunks: Sequence[Work] = ()
    ) -> Forest:
        """The trees worth verifying.

        Args:
            rows: all that decode.
            proposal: from `draft` of the same rows; None for a plain step.
            chunks: prompt that shares the pass, and makes it dearer with drafts or without.
        """
        token_ids = [[row.token_ids[-1]] for row in rows]
        if proposal is None:
            return Forest(rows, [ROOT_ONLY] * len(rows), token_ids, drafted=False)
        start = time.perf_counter()
        predicted = proposal.predicted_seconds + self._overheads.seconds(len(rows))
        trees = [ROOT_ONLY] * len(rows)
        planted = self._planted(rows, proposal, chunks, predicted)
        for place, tree, ids in zip(proposal.places, *planted, strict=True):
            trees[place] = tree
            token_ids[place].extend(ids)
        overhead = proposal.catch_up_seconds + time.perf_counter() - start
        self._excused_seconds = 0.0 if proposal.is_caught_up else proposal.catch_up_seconds
        if proposal.is_caught_up:
            self._overheads.observe(len(rows), overhead)
        seconds = proposal.pass_seconds + overhead
        return Forest(rows, trees, token_ids, True, seconds, predicted)

    def _planted(
        self,
        rows: list[Row],
        proposal: Proposal,
        chunks: Sequence[Work],
        drafting_seconds: float,
    ) -> tuple[list[DraftTree], list[list[int]]]:
        """The trees of the drafted rows and the tokens of their nodes."""
        drafted = [rows[place] for place in proposal.places]
        candidates = proposal.candidates
        if candidates is None:
            candidates = self._candidates(drafted, proposal.allowed)
        budget = None
        if self._method == "bastion":
            budget = self._controller.budget(rows, candidates, chunks, drafting_seconds)
            self._last_budget = budget.num_nodes
        taken = self._taken(candidates, budget)
        trees = plant(candidates, taken, len(drafted))
        if budget is not None:
            self._controller.judge_rows(drafted, trees, budget, proposal.load)
        ids_RDK = proposal.allowed.marginals.token_ids_RDK
        return trees, token_ids_of(candidates, taken, ids_RDK)

    def _taken(self, candidates: Candidates, budget: Budget | None) -> NDArray[np.intp]:
        if budget is not None:
            return take_first(candidates, budget.num_nodes)
        if self._method == "ddtree":
            return take_per_row(candidates, self._nodes_per_row)
        return take_first(candidates, len(candidates))

    def _candidates(self, rows: list[Row], allowed: Allowed) -> Candidates:
        max_depths = np.array([row.max_tree_depth(self._max_context) for row in rows])
        search = self._search(allowed.marginals.log_probs_RDK.shape)
        return search.among(allowed, max_depths, self._ranking(rows))

    def _search(self, shape: tuple[int, ...]) -> Search:
        """How many candidates the method looks at, of so many rows, depths and ranks."""
        num_rows, depth, _ = shape
        if self._method == "dflash":
            return Search(in_all=None, per_row=depth, num_ranks=1)
        if self._method == "ddtree":
            return Search(in_all=None, per_row=self._nodes_per_row, num_ranks=None)
        return Search(in_all=self._most_candidates(num_rows), per_row=None, num_ranks=None)

    def _most_candidates(self, num_rows: int) -> int:
        """Well above the last budget, so that it can grow quickly; looking further costs time."""
        near = max(MIN_CANDIDATES, 4 * self._last_budget)
        return min(self._max_nodes, num_rows * MAX_NODES_PER_ROW, near)

    def _ranking(self, rows: list[Row]) -> Ranking | None:
        if self._method != "bastion" or not self._calibrated:
            return None
        groups = np.array([sampling_group(row.request.sampling) for row in rows])
        return Ranking(self.acceptance, groups)

    def learn(self, verified: Sequence[Verified]) -> None:
        """Take in which nodes were accepted, of those whose parent was. Plain steps tell nothing."""
        trees = [(one, one.work.tree) for one in verified if one.work.tree is not None]
        self._num_tokens = sum(len(one.token_ids) for one, _ in trees)
        if self._drafter is None or not any(tree.num_nodes for _, tree in trees):
            return
        self._learn_vocabulary(self._drafter, verified)
        if self._method != "bastion":
            return
        outcomes = outcomes_of(
            [tree for _, tree in trees],
            [one.path for one, _ in trees],
            [sampling_group(one.work.row.request.sampling) for one, _ in trees],
        )
        if outcomes.num_outcomes:
            self.acceptance.observe(outcomes)

    def judge(self, step_seconds: float) -> None:
        """Learn whether drafting paid, from what the step took in the end.

        Catching up with tokens that were decoded plainly is not drafting's fault.
        """
        self._controller.judge(self._num_tokens, step_seconds - self._excused_seconds)

    def _learn_vocabulary(self, drafter: Drafter, verified: Sequence[Verified]) -> None:
        before = self._vocabulary.num_ids
        self._vocabulary.observe(
            [token for one in verified for token in one.token_ids],
            [token for one in verified for token in one.token_ids[: len(one.path)]],
        )
        if self._vocabulary.num_ids != before:
            drafter.narrow(self._vocabulary.num_ids)
