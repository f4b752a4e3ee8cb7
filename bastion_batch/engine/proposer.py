"""What to verify next: marginals from the drafter, and the method's stopping rule on them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.acceptance import AcceptanceModel, Outcome, sampling_group
from bastion_batch.core.budget import DraftGate, best_budget
from bastion_batch.core.tree import (
    ROOT_ONLY,
    Candidates,
    DraftTree,
    PathScores,
    best_first,
    plant,
    take_first,
    take_per_row,
)
from bastion_batch.engine.drafters import Drafter, DraftRow, Marginals
from bastion_batch.engine.latency import StepCosts
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Verified, Work
from bastion_batch.records import Method

MAX_NODES_PER_ROW = 128
"""Candidates looked at per row by `bastion`; a wider search costs time and finds no use."""

MIN_CANDIDATES = 64
"""Candidates looked at in any step of `bastion`."""


class Forest(NamedTuple):
    """The trees of a step."""

    rows: list[Row]
    trees: list[DraftTree]
    token_ids: list[list[int]]
    """Root and nodes of each."""
    drafted: bool
    """Whether the drafter was run, however few nodes came of it."""

    @property
    def num_nodes(self) -> int:
        """Drafted nodes over all rows."""
        return sum(tree.num_nodes for tree in self.trees)

    def works(self) -> list[Work]:
        """What the rows contribute to the pass."""
        return [Work(*work) for work in zip(self.rows, self.token_ids, self.trees, strict=True)]


class Proposer:
    """Runs the drafter when it pays, and keeps the candidates that the method wants.

    Args:
        drafter: None to decode plainly.
        method: `ar` none, `dflash` the top-1 chain, `ddtree` the best of every row, `bastion` the
            best of the batch, as many as make the step fastest per token.
        costs: what passes take; learns from the engine meanwhile.
        end_ids: tokens after which nothing can follow.
        max_context: most tokens of a row.
        nodes_per_row: of `ddtree`.
        max_nodes: of a pass, for `bastion`.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        method: Method,
        costs: StepCosts,
        *,
        end_ids: frozenset[int],
        max_context: int,
        nodes_per_row: int,
        max_nodes: int,
    ) -> None:
        self._drafter = drafter
        self._method = method
        self._costs = costs
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._max_context = max_context
        self._nodes_per_row = nodes_per_row
        self._max_nodes = max_nodes
        self._gate = DraftGate()
        self._last_budget = 0
        self.acceptance = AcceptanceModel(drafter.depth if drafter else 1)

    @property
    def method(self) -> Method:
        """How candidates are kept."""
        return self._method

    def use(self, method: Method, nodes_per_row: int) -> None:
        """Keep candidates by another method from the next step on."""
        self._method = method
        self._nodes_per_row = nodes_per_row

    def draft(self, rows: list[Row]) -> Marginals | None:
        """Marginals of all rows, or None for a plain step."""
        if self._drafter is None or self._method == "ar" or not rows:
            return None
        if self._method == "bastion" and not self._gate.wants_draft():
            return None
        return self._drafter.draft([DraftRow(row.key, row.token_ids) for row in rows])

    def grow(self, rows: list[Row], marginals: Marginals | None) -> Forest:
        """The trees worth verifying."""
        token_ids = [[row.token_ids[-1]] for row in rows]
        if marginals is None:
            return Forest(rows, [ROOT_ONLY] * len(rows), token_ids, drafted=False)
        candidates = self._candidates(rows, marginals)
        trees = plant(candidates, self._keep(rows, candidates), len(rows))
        for tokens, tree, ids_DK in zip(token_ids, trees, marginals.token_ids_RDK, strict=True):
            depth, rank = np.array(tree.depths[1:], int) - 1, np.array(tree.ranks[1:], int)
            tokens.extend(ids_DK[depth, rank].tolist())
        return Forest(rows, trees, token_ids, drafted=True)

    def _candidates(self, rows: list[Row], marginals: Marginals) -> Candidates:
        num_rows, depth, num_ranks = marginals.log_probs_RDK.shape
        if self._method == "dflash":
            num_ranks = 1
        per_row = {"dflash": depth, "ddtree": self._nodes_per_row}.get(self._method)
        in_all = None if per_row else self._most_candidates(num_rows)
        return best_first(
            marginals.log_probs_RDK[:, :, :num_ranks],
            np.array([row.max_tree_depth(self._max_context) for row in rows]),
            in_all,
            self._leaves(rows, marginals),
            scores=self._scores(rows, marginals) if self._method == "bastion" else None,
            max_per_row=per_row,
        )

    def _most_candidates(self, num_rows: int) -> int:
        """Well above the last budget, so that it can grow quickly; looking further costs time."""
        near = max(MIN_CANDIDATES, 4 * self._last_budget)
        return min(self._max_nodes, num_rows * MAX_NODES_PER_ROW, near)

    def _scores(self, rows: list[Row], marginals: Marginals) -> PathScores:
        groups = np.array([sampling_group(row.request.sampling) for row in rows])
        return self.acceptance.log_scores(marginals.log_probs_RDK, groups)

    def learn(self, verified: Sequence[Verified]) -> None:
        """Take in which nodes were accepted, of those whose parent was."""
        if self._method != "bastion":
            return
        outcomes = [outcome for v in verified if v.work.tree for outcome in _outcomes(v)]
        if outcomes:
            self.acceptance.observe(outcomes)

    def _leaves(self, rows: list[Row], marginals: Marginals) -> NDArray[np.bool_]:
        """Marks the tokens after which a row's output ends."""
        leaves = np.isin(marginals.token_ids_RDK, self._end_ids)
        for number, row in enumerate(rows):
            if row.request.sampling.ignore_eos:
                leaves[number] = False
        return leaves

    def _keep(self, rows: list[Row], candidates: Candidates) -> NDArray[np.intp]:
        if self._method == "ddtree":
            return take_per_row(candidates, self._nodes_per_row)
        if self._method == "dflash":
            return take_first(candidates, len(candidates))
        return take_first(candidates, self._best_num_nodes(rows, candidates))

    def _best_num_nodes(self, rows: list[Row], candidates: Candidates) -> int:
        """The batch's budget; the draft gate learns whether drafting paid."""
        num_rows = len(rows)
        context = sum(row.context_length for row in rows)
        tokens = num_rows + np.arange(len(candidates) + 1.0)
        seconds = self._costs.step_seconds(tokens, num_rows, context, drafted=True)
        budget = best_budget(candidates.log_scores_N, num_rows, seconds)
        plain = self._costs.step_seconds(tokens[:1], num_rows, context, drafted=False)
        self._gate.observe(budget.tokens_per_second, num_rows / float(plain[0]))
        self._last_budget = budget.num_nodes
        return budget.num_nodes


def _outcomes(verified: Verified) -> Iterator[Outcome]:
    tree = verified.work.tree
    assert tree is not None
    group = sampling_group(verified.work.row.request.sampling)
    accepted, on_path = {0, *verified.path}, set(tree.top1_path)
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        if parent in accepted:
            yield Outcome(
                group, tree.depths[node], parent in on_path, tree.log_probs[node], node in accepted
            )
