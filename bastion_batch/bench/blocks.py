"""Arms that take turns on live rows: a block of steps each, neighbours in time compared.

The text of a row does not depend on the method, so arms may share their rows: what one arm decodes
the others need not decode again, and the batch stays as it is while they alternate. Rows that end
are replaced from the prompts before the next step. Steps that carry a prompt are not counted, nor
are the first ones of a block, in which a drafter catches up with what other arms decoded.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from bastion_batch.bench.ratios import Share
from bastion_batch.engine import Engine
from bastion_batch.records import Completion, EngineTotals, Method, Request, SamplingParams

Prompt = tuple[int, ...]

UNCOUNTED_STEPS = 2
"""Decode steps at the start of a block that are not counted."""
MAX_STEPS_PER_COUNTED = 8
"""A block ends after so many steps per step that it wanted, however few could be counted."""


class LiveRows:
    """An engine whose batch is kept full from a list of prompts, over and over.

    Args:
        engine: its `max_batch` is the batch size that is kept.
        prompts: token ids, cycled.
        sampling: of every row. The first rows end early, each at another length, so that rows do
            not all begin and end together.
        keep: takes every completion, with its step records.
        in_midst: the first rows are given made-up output, so that contexts are at once as long as
            they are on average; for arms of which only the time matters.
        num_made_up: tokens of such output that every row begins with.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        keep: Callable[[Completion], None] = lambda completion: None,
        *,
        in_midst: bool = False,
        num_made_up: int = 0,
    ) -> None:
        self.engine = engine
        requests = _requests(prompts, sampling, engine, in_midst=in_midst)
        if num_made_up:
            requests = _far_on(prompts, sampling, engine, num_made_up)
        self._requests = requests
        self._keep = keep

    def step(self) -> "TimedStep":
        """Fill the batch, run one step and say what it did."""
        engine = self.engine
        while engine.num_running + engine.num_waiting < engine.max_batch:
            engine.add(next(self._requests))
        before = engine.totals
        start = time.perf_counter()
        ended = engine.step()
        seconds = time.perf_counter() - start
        for completion in ended:
            self._keep(completion)
        return TimedStep(engine.totals.minus(before), seconds)

    def drain(self) -> None:
        """Decode what is left, plainly, so that other rows may have the engine."""
        self.engine.use("ar")
        while self.engine.has_work:
            for completion in self.engine.step():
                self._keep(completion)


class TimedStep(NamedTuple):
    """What one step added to its engine's totals, and the seconds of the whole call."""

    totals: EngineTotals
    seconds: float


def _requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, engine: Engine, *, in_midst: bool
) -> Iterator[Request]:
    batch_size = engine.max_batch
    for number in count():
        prompt, limit = prompts[number % len(prompts)], sampling.max_new_tokens
        done: tuple[int, ...] = ()
        if number < batch_size:
            left = max(1, limit * (number + 1) // batch_size)
            if in_midst:
                done = _made_up(prompt, engine, limit - left)
            else:
                limit = left
        yield Request(
            row_id=str(number),
            prompt_ids=prompt,
            sampling=replace(sampling, max_new_tokens=limit),
            generated_ids=done,
            noise_key=number,
        )


def _far_on(
    prompts: Sequence[Prompt], sampling: SamplingParams, engine: Engine, num_made_up: int
) -> Iterator[Request]:
    """Rows that all begin after so much output."""
    for number in count():
        prompt = prompts[number % len(prompts)]
        yield Request(
            row_id=str(number),
            prompt_ids=prompt,
            sampling=sampling,
            generated_ids=_made_up(prompt, engine, num_made_up),
            noise_key=number,
        )


def _made_up(prompt: Prompt, engine: Engine, num_tokens: int) -> tuple[int, ...]:
    """Output that does not end: a token of the prompt, over and over."""
    ends = engine.target.ids.end
    return (next(token for token in prompt if token not in ends),) * num_tokens


class Arm(NamedTuple):
    """A method on some live rows; several arms may share them."""

    name: str
    rows: LiveRows
    method: Method
    nodes_per_row: int = 0
    """Of `ddtree`."""


class Block(NamedTuple):
    """The counted steps of one arm's turn, added up."""

    arm: str
    num_steps: int
    num_row_steps: int
    num_tokens: int
    num_nodes: int
    seconds: float

    @property
    def share(self) -> Share:
        """What a ratio needs of it."""
        return Share(self.num_tokens, self.seconds)


def run_block(arm: Arm, num_steps: int, uncounted_steps: int = UNCOUNTED_STEPS) -> Block:
    """Decode by the arm's method until `num_steps` steps have been counted."""
    arm.rows.engine.use(arm.method, arm.nodes_per_row)
    left_out, counted = uncounted_steps, []
    for _ in range(MAX_STEPS_PER_COUNTED * num_steps + uncounted_steps):
        step = arm.rows.step()
        if step.totals.num_prefill_tokens or not step.totals.num_row_steps:
            continue
        if left_out:
            left_out -= 1
            continue
        counted.append(step)
        if len(counted) == num_steps:
            break
    return Block(
        arm=arm.name,
        num_steps=len(counted),
        num_row_steps=sum(step.totals.num_row_steps for step in counted),
        num_tokens=sum(step.totals.num_decoded for step in counted),
        num_nodes=sum(step.totals.num_nodes for step in counted),
        seconds=sum(step.seconds for step in counted),
    )


def alternate(
    arms: Sequence[Arm],
    *,
    seconds: float,
    block_steps: int,
    min_groups: int = 2,
    uncounted_steps: int = UNCOUNTED_STEPS,
    progress: Callable[[str], None] = lambda line: None,
) -> list[list[Block]]:
    """Groups of one block per arm, in the order of `arms`, for about `seconds`.

    The arms take their turns forwards and backwards by turns, so that a steady drift favours none.
    A group in which an arm's every step carried a prompt is left out.
    """
    groups: list[list[Block]] = []
    start = time.perf_counter()
    for number in count():
        elapsed = time.perf_counter() - start
        if number >= min_groups and elapsed + elapsed / number > seconds:
            break
        turns = arms if number % 2 == 0 else tuple(reversed(arms))
        blocks = {arm.name: run_block(arm, block_steps, uncounted_steps) for arm in turns}
        if all(block.num_tokens for block in blocks.values()):
            groups.append([blocks[arm.name] for arm in arms])
        progress(
            f"group {number + 1}: "
            + ", ".join(f"{b.arm} {_speed(b):.1f}" for b in blocks.values())
            + " tok/s"
        )
    return groups


def _speed(block: Block) -> float:
    return block.num_tokens / block.seconds if block.seconds else 0.0
