"""One verification pass: packed tokens of trees and prompts in, committed paths out."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bastion_batch.core.tree import DraftTree
from bastion_batch.engine.attention import AttentionPlan, PassRow, pass_order
from bastion_batch.engine.buckets import Bucket, bucket_for
from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.row import Row
from bastion_batch.engine.sampling import Draw, argmax, choose, is_plain_greedy
from bastion_batch.engine.target import Target
from bastion_batch.engine.transfer import to_device


class Work(NamedTuple):
    """What one row contributes to a pass: a tree to verify, or a chunk of prompt."""

    row: Row
    token_ids: list[int]
    """Root and nodes, or the chunk's tokens."""
    tree: DraftTree | None
    """None for a chunk of prompt."""

    @property
    def num_logits(self) -> int:
        """Tokens after which a token may be chosen: all of a tree, the last of a whole prompt."""
        if self.tree is not None:
            return len(self.token_ids)
        row = self.row
        last = row.context_length + len(self.token_ids) == row.prefill_end
        return int(last and not row.output_ids)


class Verified(NamedTuple):
    """A pass's outcome for one row."""

    work: Work
    path: list[int]
    """Accepted nodes from the root's child on; empty for a chunk of prompt."""
    token_ids: list[int]
    """Accepted tokens and the target's own next one; empty unless the row may commit."""
    first_token: int
    """Where the row's tokens begin in the pass."""

    @property
    def cached(self) -> list[int]:
        """Tokens of the pass, counted from the row's first, that become its context."""
        if self.work.tree is None:
            return list(range(len(self.work.token_ids)))
        return [0, *self.path]


class PassLayout(NamedTuple):
    """How a pass suits its device. The text does not depend on it."""

    draw_all: bool
    """Choose at every node of sampled rows at once, and so wait for the device once, rather than
    level by level at the nodes that the walk visits."""
    bucket: Bucket
    """To how many tokens the pass is padded."""

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "PassLayout":
        """What suits a device: on a CPU there is nothing to wait for."""
        return cls(draw_all=device.type != "cpu", bucket=bucket_for(device, dtype))


class PassResult(NamedTuple):
    """Everything a pass leaves."""

    verified: list[Verified]
    taps_SF: Tensor | None


def verify(
    target: Target,
    cache: KVCache,
    works: Sequence[Work],
    taps: tuple[int, ...],
    layout: PassLayout | None = None,
) -> PassResult:
    """Run the target once over all rows' tokens and walk their trees.

    Requires a slot with room for its tokens in every row. Leaves the tokens' keys and values in
    scratch space; committing them is the caller's. `layout` is the device's own if None.
    """
    layout = layout or PassLayout.of(target.device, target.dtype)
    order = pass_order([_slot(work.row) for work in works], [w.tree is None for w in works])
    works = [works[place] for place in order]
    token_ids = np.array([token for work in works for token in work.token_ids])
    positions = np.concatenate([_positions(work) for work in works])
    num_tokens = len(token_ids)
    num_padding = layout.bucket(num_tokens) - num_tokens
    plan = AttentionPlan(
        cache,
        [_pass_row(work) for work in works],
        target.stack.config.num_q_heads,
        num_padding=num_padding,
    )
    out = target.forward(
        to_device(np.pad(token_ids, (0, num_padding)), target.device),
        to_device(np.pad(positions, (0, num_padding)), target.device),
        int(positions.max()),
        plan,
        taps,
    )
    needed = _needed(works)
    hidden = out.hidden_SE
    if 0 < len(needed) < num_tokens:
        padded = np.pad(needed, (0, layout.bucket(len(needed)) - len(needed)), mode="edge")
        hidden = hidden[to_device(padded, target.device)]
    walkers = _walkers(works)
    if len(needed):
        logits_NV = target.logits(hidden)[: len(needed)]
        _walk(walkers, logits_NV, draw_all=layout.draw_all)
    return PassResult(_verified(walkers), out.taps_SF)


def _slot(row: Row):  # noqa: ANN202 - a Slot
    assert row.slot is not None, "a row in a pass has a slot"
    return row.slot


def _pass_row(work: Work) -> PassRow:
    visible = work.tree.ancestors_NN() if work.tree else None
    return PassRow(_slot(work.row), len(work.token_ids), visible)


def _positions(work: Work) -> np.ndarray:
    offsets = work.tree.depths if work.tree else range(len(work.token_ids))
    return work.row.context_length + np.fromiter(offsets, np.int64, len(work.token_ids))


def _needed(works: Sequence[Work]) -> np.ndarray:
    """Tokens of the pass whose logits are needed, in order."""
    parts, start = [], 0
    for work in works:
        stop = start + len(work.token_ids)
        parts.append(np.arange(stop - work.num_logits, stop))
        start = stop
    return np.concatenate(parts)


class _Walker:
    """A row on its way down its tree."""

    def __init__(self, work: Work, first_logit: int) -> None:
        self.work = work
        self.first_logit = first_logit
        self.node = 0
        self.path: list[int] = []
        self.token_ids: list[int] = []
        tree = work.tree
        self._children: dict[tuple[int, int], int] = {}
        if tree is not None:
            pairs = zip(tree.parents[1:], work.token_ids[1:], strict=True)
            self._children = {pair: node for node, pair in enumerate(pairs, start=1)}

    @property
    def logit(self) -> int:
        return self.first_logit + self.node

    @property
    def is_plain_greedy(self) -> bool:
        return is_plain_greedy(self.work.row.request.sampling)

    def draw(self) -> Draw:
        """The draw at the node that the walk has reached."""
        return self.work.row.draw(self.token_ids)

    def draws(self) -> list[Draw]:
        """The draws at all the row's nodes, each after its own path, or after a whole prompt."""
        paths: list[list[int]] = [[]]
        if self.work.tree is not None:
            nodes = zip(self.work.tree.parents[1:], self.work.token_ids[1:], strict=True)
            for parent, token_id in nodes:
                paths.append([*paths[parent], token_id])
        return [self.work.row.draw(path) for path in paths]

    def take(self, token_id: int) -> bool:
        """Emit the target's token; True if a child carries it and the walk goes on there."""
        self.token_ids.append(token_id)
        child = self._children.get((self.node, token_id))
        if child is None:
            return False
        self.node = child
        self.path.append(child)
        return True

    def follow(self, tokens_N: list[int]) -> None:
        """Walk to the end, given the target's token after every logit of the pass."""
        while self.take(tokens_N[self.logit]):
            pass


def _walkers(works: Sequence[Work]) -> list[_Walker]:
    walkers, first = [], 0
    for work in works:
        walkers.append(_Walker(work, first))
        first += work.num_logits
    return walkers


def _walk(walkers: Sequence[_Walker], logits_NV: Tensor, *, draw_all: bool) -> None:
    """Follow the target's own tokens down every tree."""
    moving = [walker for walker in walkers if walker.work.num_logits]
    sampled = [walker for walker in moving if not walker.is_plain_greedy]
    if sampled and draw_all:
        tokens = choose(logits_NV, [draw for walker in moving for draw in walker.draws()])
        _follow(moving, tokens)
        return
    if len(sampled) < len(moving):
        _follow([walker for walker in moving if walker.is_plain_greedy], argmax(logits_NV))
    _draw_by_level(sampled, logits_NV)


def _follow(walkers: Sequence[_Walker], tokens_N: Tensor) -> None:
    """Walk all rows by the tokens of all nodes: the one wait for the device."""
    tokens = tokens_N.tolist()
    for walker in walkers:
        walker.follow(tokens)


def _draw_by_level(walkers: Sequence[_Walker], logits_NV: Tensor) -> None:
    """Draw at the visited nodes only, all rows one level at a time."""
    while walkers:
        index = to_device(np.array([walker.logit for walker in walkers]), logits_NV.device)
        picked = choose(logits_NV[index], [walker.draw() for walker in walkers]).tolist()
        walkers = [w for w, token in zip(walkers, picked, strict=True) if w.take(token)]


def _verified(walkers: list[_Walker]) -> list[Verified]:
    result, start = [], 0
    for walker in walkers:
        result.append(Verified(walker.work, walker.path, walker.token_ids, start))
        start += len(walker.work.token_ids)
    return result
