"""Decoding over again on paper: recorded marginals and texts in, what any policy makes of them out.

The text of a row is the same whatever trees are verified, so a record of the drafter's marginals at
every position of a text, with a measured cost of steps, decides exactly what each policy would have
accepted and about how long it would have taken. The replay steps as the engine does: it begins where
the last step's accepted path ended, and learns from the nodes whose parents were accepted.

Shape letters: R live rows, D depth, K ranks, P positions of a text, N nodes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bastion_batch.core.acceptance import outcomes_of
from bastion_batch.core.policies import Policy, Position, StepCurve
from bastion_batch.core.tree import ROOT_ONLY, DraftTree


class RecordedText(NamedTuple):
    """One row: its output, and what the drafter proposed at every position of it."""

    output_ids: NDArray[np.int32]
    max_output: int
    """The most tokens that the row might have had, by its limit and the target's context."""
    log_probs_PDK: NDArray[np.float32]
    """Entry p belongs to the step that begins with p + 1 output tokens."""
    token_ids_PDK: NDArray[np.int32]

    @property
    def num_positions(self) -> int:
        """Steps that may begin in this text."""
        return min(len(self.output_ids) - 1, len(self.log_probs_PDK))


class ReplayStep(NamedTuple):
    """One step of all live rows."""

    texts: tuple[int, ...]
    """Which text each row follows, as an index into the records."""
    num_accepted: tuple[int, ...]
    num_committed: int
    num_nodes: int
    expected_tokens: float
    drafted: bool


class Replayed(NamedTuple):
    """What a policy came to, over the steps of a full batch."""

    num_row_steps: int
    tokens_per_step: float
    """Of a row."""
    nodes_per_row_step: float
    tokens_per_second: float
    over_plain: float
    """Tokens per second over those of plain decoding by the same curve."""
    expected_over_realised: float
    """What the policy expected of its drafted steps over what they accepted; 1 if it drafted none."""


class _Cursor:
    """A row on its way through its text."""

    def __init__(self, number: int, text: RecordedText) -> None:
        self.number = number
        self.text = text
        self.num_output = 1

    @property
    def is_done(self) -> bool:
        return self.num_output > self.text.num_positions

    @property
    def entry(self) -> int:
        return self.num_output - 1

    @property
    def max_depth(self) -> int:
        return max(0, self.text.max_output - self.num_output - 1)

    def walk(self, tree: DraftTree) -> list[int]:
        """The accepted nodes: the path that carries the text's coming tokens."""
        ids_DK = self.text.token_ids_PDK[self.entry]
        children = {
            (parent, int(ids_DK[depth - 1, rank])): node
            for node, (parent, depth, rank) in enumerate(
                zip(tree.parents, tree.depths, tree.ranks, strict=True)
            )
            if node
        }
        path, node = [], 0
        for token in self.text.output_ids[self.num_output :].tolist():
            child = children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def advance(self, num_accepted: int) -> int:
        """Commit the accepted tokens and the bonus, up to the text's end; returns how many."""
        kept = min(num_accepted + 1, len(self.text.output_ids) - self.num_output)
        self.num_output += kept
        return kept


def replay(
    texts: Sequence[RecordedText],
    policy: Policy,
    batch_size: int,
    end_ids: Iterable[int] = (),
    group: int = 0,
) -> Iterator[ReplayStep]:
    """Every step of decoding the texts in order, `batch_size` at a time, until all are decoded.

    Args:
        texts: in the order in which rows enter.
        policy: is told of its outcomes after every step.
        batch_size: R; when a text ends the next one takes its place.
        end_ids: tokens after which no node may follow.
        group: the sampling group of the rows.
    """
    ends = np.array(sorted(end_ids), np.int64)
    waiting = deque(_Cursor(*pair) for pair in enumerate(texts))
    live: list[_Cursor] = []
    while True:
        live = [row for row in live if not row.is_done]
        while waiting and len(live) < batch_size:
            row = waiting.popleft()
            if not row.is_done:
                live.append(row)
        if not live:
            return
        yield _step(live, policy, ends, group)


def _step(
    live: list[_Cursor], policy: Policy, end_ids: NDArray[np.int64], group: int
) -> ReplayStep:
    ids_RDK = np.stack([row.text.token_ids_PDK[row.entry] for row in live])
    at = Position(
        np.stack([row.text.log_probs_PDK[row.entry] for row in live]),
        np.array([row.max_depth for row in live]),
        np.isin(ids_RDK, end_ids),
    )
    trees = policy.trees(at)
    drafted = trees is not None
    trees = trees or [ROOT_ONLY] * len(live)
    paths = [row.walk(tree) for row, tree in zip(live, trees, strict=True)]
    policy.learn(outcomes_of(trees, paths, [group] * len(live)))
    numbers = tuple(row.number for row in live)
    accepted = tuple(map(len, paths))
    return ReplayStep(
        texts=numbers,
        num_accepted=accepted,
        num_committed=sum(row.advance(n) for row, n in zip(live, accepted, strict=True)),
        num_nodes=sum(tree.num_nodes for tree in trees),
        expected_tokens=sum(tree.expected_tokens for tree in trees),
        drafted=drafted,
    )


def summarise(steps: Iterable[ReplayStep], curve: StepCurve, batch_size: int) -> Replayed:
    """Add up the steps of a full batch, which are those that the curve prices.

    Raises:
        ValueError: the batch was never full.
    """
    full = [step for step in steps if len(step.texts) == batch_size]
    if not full:
        raise ValueError(f"no step has {batch_size} live rows: record more texts")
    nodes = np.array([step.num_nodes for step in full])
    drafted = np.array([step.drafted for step in full])
    seconds = np.where(drafted, curve.seconds(nodes), curve.plain_seconds).sum()
    committed = sum(step.num_committed for step in full)
    num_row_steps = len(full) * batch_size
    expected = sum(step.expected_tokens for step in full if step.drafted)
    realised = sum(sum(step.num_accepted) + batch_size for step in full if step.drafted)
    return Replayed(
        num_row_steps=num_row_steps,
        tokens_per_step=committed / num_row_steps,
        nodes_per_row_step=float(nodes.sum()) / num_row_steps,
        tokens_per_second=committed / float(seconds),
        over_plain=committed / float(seconds) / (batch_size / curve.plain_seconds),
        expected_over_realised=expected / realised if realised else 1.0,
    )
