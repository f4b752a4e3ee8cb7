"""What training is judged by: tokens per step on held-out prompts, decoded by the engine.

Accuracy on given text flatters: a loop comes back to where the drafter has just failed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bastion_batch.core.devices import DeviceSpeed
from bastion_batch.core.latency import LatencyModel
from bastion_batch.engine import Engine
from bastion_batch.engine.costs import StepCosts
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.target import Target
from bastion_batch.errors import DataError
from bastion_batch.records import Method, Request, SamplingParams

MAX_ROWS = 32
"""Prompts decoded together."""
_ANY_SPEED = DeviceSpeed(1e12, 1e10, "not measured: neither method looks at costs")


class TokensPerStep(NamedTuple):
    """Committed tokens over decode steps, greedy, those that end a prefill left out."""

    chain: float
    """Of the drafter's most probable path."""
    tree: float
    """Of the best-first tree of a fixed size."""

    @property
    def score(self) -> float:
        """What drafters are compared by."""
        return (self.chain + self.tree) / 2


def tokens_per_step(
    target: Target,
    drafter: Path,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    tree_nodes: int,
) -> TokensPerStep:
    """Decode the prompts with a drafter's chain, then with its tree.

    Raises:
        DataError: nothing was decoded: every answer is one token.
    """
    engine = Engine(
        target,
        load_drafter(drafter, target),
        costs=StepCosts(LatencyModel(target.shape, _ANY_SPEED), None),
        method="dflash",
        nodes_per_row=tree_nodes,
        max_batch=min(MAX_ROWS, len(prompts)),
    )
    requests = [
        Request(
            row_id=str(number),
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
        )
        for number, ids in enumerate(prompts)
    ]
    methods: tuple[Method, Method] = ("dflash", "ddtree")
    chain, tree = (_decoded(engine, requests, method, tree_nodes) for method in methods)
    return TokensPerStep(chain, tree)


def _decoded(engine: Engine, requests: list[Request], method: Method, nodes: int) -> float:
    before = engine.totals
    engine.use(method, nodes)
    for _ in engine.generate(requests):
        pass
    found = engine.totals.minus(before).tokens_per_step
    if found is None:
        raise DataError("the held-out prompts are all answered by a single token: give others")
    return found
