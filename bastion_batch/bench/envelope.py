"""All methods at one batch size, and `bastion` against the best fixed choice.

Three phases in one process. On half of the prompts `ddtree` is tried with every budget and the best
fixed arm is chosen: plain decoding, the chain, or a tree of one size in every row. On the other half
the arms that matter are compared, and then `bastion` and the chosen arm alone, turn by turn: that
ratio is the envelope, and the choice does not flatter what was chosen.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bastion_batch.bench.blocks import Arm, Block, LiveRows, alternate, run_block
from bastion_batch.bench.ratios import paired_ratio
from bastion_batch.bench.setup import Bench
from bastion_batch.core.roofline import PassLoad
from bastion_batch.engine import Engine
from bastion_batch.engine.device import device_speed
from bastion_batch.errors import InputError
from bastion_batch.records import Completion

CHOOSING_SHARE, COMPARING_SHARE, DUEL_SHARE = 0.3, 0.3, 0.4
"""Of the time of a batch size. Two arms alone give the most pairs for the time."""
SCREENING_STEPS = 5
MIN_SCREENING_ROW_STEPS = 80
HOPELESS = 0.6
"""Of the fastest arm's speed; a slower one is not measured on."""
PLAIN = "ar-alone"
"""The arm of an engine that has no drafter to keep informed, on rows of its own."""

Progress = Callable[[str], None]


class Phase(NamedTuple):
    """Groups of blocks, a block per arm."""

    arms: tuple[Arm, ...]
    groups: list[list[Block]]

    def blocks(self, name: str) -> list[Block]:
        """All blocks of one arm."""
        place = [arm.name for arm in self.arms].index(name)
        return [group[place] for group in self.groups]


class Acceptance:
    """Sums up what `bastion` expected of its steps and what came of them."""

    def __init__(self) -> None:
        self.num_row_steps = 0
        self.num_row_steps_to_skip = 0
        self._expected = self._raw = self._realised = 0.0

    def add(self, completion: Completion) -> None:
        """Take in the drafted `bastion` steps of one row, after the warm-up."""
        for step in completion.records:
            if step.method != "bastion":
                continue
            if self.num_row_steps_to_skip > 0:
                self.num_row_steps_to_skip -= 1
                continue
            self.num_row_steps += 1
            self._expected += step.expected_tokens
            self._raw += step.expected_tokens_raw
            self._realised += step.num_accepted + 1

    def report(self) -> dict[str, float] | None:
        """Expected over realised tokens per step, by calibrated scores and by raw q."""
        if not self.num_row_steps:
            return None
        return {
            "num_row_steps": self.num_row_steps,
            "expected_over_realised": round(self._expected / self._realised, 4),
            "raw_expected_over_realised": round(self._raw / self._realised, 4),
        }


def measure_methods(bench: Bench, batch_size: int, progress: Progress) -> dict[str, Any]:
    """Compare the methods at one batch size; JSON-able."""
    config = bench.config
    needs_drafter = any(method != "ar" for method in config.methods)
    engine = bench.engine(batch_size, bench.drafter() if needs_drafter else None, "bastion")
    alone = bench.engine(batch_size, None, "ar") if needs_drafter else engine
    acceptance = Acceptance()
    acceptance.num_row_steps_to_skip = config.warm_up_row_steps
    choosing = _choose(bench, engine, alone, acceptance, progress)
    comparing, duel = _compare(bench, engine, alone, choosing, acceptance, progress)
    return {
        "batch": batch_size,
        "arms": {arm.name: _arm_report(comparing.blocks(arm.name)) for arm in comparing.arms},
        "tried": {arm.name: _arm_report(choosing.blocks(arm.name)) for arm in choosing.arms},
        "ratios": _ratios(comparing),
        "envelope": _envelope(duel),
        "acceptance": acceptance.report(),
        "step_curve": _step_curve(choosing, batch_size),
        "plain_roofline_tokens_per_second": _plain_bound(bench, batch_size),
        "prediction": engine.info.calibration,
    }


def _choose(
    bench: Bench, engine: Engine, alone: Engine, acceptance: Acceptance, progress: Progress
) -> Phase:
    config, batch_size = bench.config, engine.max_batch
    rows, alone_rows = _rows(bench, bench.choosing_prompts, engine, alone, acceptance)
    budgets = [n for n in config.nodes_per_row if n * batch_size <= config.max_nodes]
    arms = [Arm(PLAIN, alone_rows, "ar")] if alone is not engine else []
    arms += [Arm("ar", rows, "ar")] if "ar" in config.methods else []
    arms += [Arm("dflash", rows, "dflash")] if "dflash" in config.methods else []
    if "ddtree" in config.methods:
        arms += [Arm(f"ddtree-{n}", rows, "ddtree", n) for n in budgets]
    progress("warming up")
    arms = _promising(arms, batch_size)
    if "bastion" in config.methods:
        steps = max(config.warm_up_steps, config.warm_up_row_steps // batch_size)
        run_block(Arm("bastion", rows, "bastion"), steps)
    phase = _phase(arms, bench, CHOOSING_SHARE, lambda line: progress(f"choosing, {line}"))
    rows.drain()
    alone_rows.drain()
    return phase


def _promising(arms: list[Arm], batch_size: int) -> list[Arm]:
    """The arms after a warm-up, less those that it shows to be far behind.

    Plain decoding and the best tree stay in any case, and every arm of a small batch, whose few
    tokens show little.
    """
    speeds = {arm.name: _pooled_speed([run_block(arm, SCREENING_STEPS)]) for arm in arms}
    if batch_size * SCREENING_STEPS < MIN_SCREENING_ROW_STEPS:
        return arms
    trees = [name for name in speeds if name.startswith("ddtree")]
    kept = {PLAIN, "ar", max(trees, key=speeds.__getitem__, default="")}
    floor = HOPELESS * max(speeds.values())
    return [arm for arm in arms if arm.name in kept or speeds[arm.name] >= floor]


def _compare(
    bench: Bench,
    engine: Engine,
    alone: Engine,
    choosing: Phase,
    acceptance: Acceptance,
    progress: Progress,
) -> tuple[Phase, Phase | None]:
    """All arms that matter, then `bastion` against the best fixed one."""
    rows, alone_rows = _rows(bench, bench.comparing_prompts, engine, alone, acceptance)
    speeds = {arm.name: _pooled_speed(choosing.blocks(arm.name)) for arm in choosing.arms}
    kept = {PLAIN, "ar", best_of(choosing, "ddtree")}
    if speeds.get("dflash", 0.0) >= HOPELESS * max(speeds.values(), default=0.0):
        kept.add("dflash")
    arms = [
        arm._replace(rows=alone_rows if arm.name == PLAIN else rows)
        for arm in choosing.arms
        if arm.name in kept
    ]
    if "bastion" in bench.config.methods:
        arms.append(Arm("bastion", rows, "bastion"))
    for arm in arms:
        run_block(arm, 2)
    comparing = _phase(arms, bench, COMPARING_SHARE, lambda line: progress(f"comparing, {line}"))
    rivals = [arm for arm in arms if arm.name in (best_of(choosing), "bastion")]
    duel = (
        _phase(rivals, bench, DUEL_SHARE, lambda line: progress(f"best against bastion, {line}"))
        if len(rivals) == 2 and rivals[1].name == "bastion"
        else None
    )
    rows.drain()  # the step records of a row come with its end
    return comparing, duel


def _rows(
    bench: Bench, prompts: Sequence[Any], engine: Engine, alone: Engine, acceptance: Acceptance
) -> tuple[LiveRows, LiveRows]:
    """Live rows of both engines; the same two if there is but one engine."""
    sampling = bench.config.sampling
    rows = LiveRows(engine, prompts, sampling, acceptance.add)
    if alone is engine:
        return rows, rows
    # Rows of their own get on a token a step, those that arms share several: left to themselves
    # they would be the shorter ones for the first hundreds of steps.
    return rows, LiveRows(alone, prompts, sampling, in_midst=True)


def _phase(arms: Sequence[Arm], bench: Bench, share: float, progress: Progress) -> Phase:
    groups = alternate(
        arms,
        seconds=share * bench.config.seconds,
        block_steps=bench.config.block_steps,
        progress=progress,
    )
    if not groups:
        raise InputError(
            f"batch {arms[0].rows.engine.max_batch}: nothing could be counted, as every step "
            f"carried a prompt; max_new_tokens {bench.config.max_new_tokens} is too few"
        )
    return Phase(tuple(arms), groups)


def best_of(phase: Phase, prefix: str = "") -> str | None:
    """The fastest arm whose name begins so, all groups pooled; None without one."""
    names = [arm.name for arm in phase.arms if arm.name.startswith(prefix)]
    return max(names, key=lambda name: _pooled_speed(phase.blocks(name)), default=None)


def _pooled_speed(blocks: Sequence[Block]) -> float:
    seconds = sum(block.seconds for block in blocks)
    return sum(block.num_tokens for block in blocks) / seconds if seconds else 0.0


def _arm_report(blocks: Sequence[Block]) -> dict[str, float]:
    row_steps = sum(block.num_row_steps for block in blocks)
    return {
        "tokens": sum(block.num_tokens for block in blocks),
        "tokens_per_second": round(_pooled_speed(blocks), 2),
        "tokens_per_step": round(sum(b.num_tokens for b in blocks) / row_steps, 3),
        "nodes_per_row_step": round(sum(b.num_nodes for b in blocks) / row_steps, 2),
        "step_seconds": round(_step_seconds(blocks), 6),
    }


def _step_seconds(blocks: Sequence[Block]) -> float:
    return float(np.median([block.seconds / block.num_steps for block in blocks]))


def _ratios(phase: Phase) -> dict[str, Any]:
    """Every arm over plain decoding, and `bastion` over every arm."""
    names = [arm.name for arm in phase.arms]
    pairs = [(name, "ar") for name in names if name != "ar" and "ar" in names]
    pairs += [("bastion", name) for name in names if "bastion" in names and name != "bastion"]
    return {f"{a}/{b}": _rounded(phase, a, b) for a, b in dict.fromkeys(pairs)}


def _rounded(phase: Phase, name: str, baseline: str) -> dict[str, float]:
    ratio = paired_ratio(
        [block.share for block in phase.blocks(name)],
        [block.share for block in phase.blocks(baseline)],
    )
    return {key: round(value, 4) for key, value in ratio._asdict().items()}


def _envelope(duel: Phase | None) -> dict[str, Any] | None:
    """`bastion` over the fixed arm that was best on the other prompts."""
    if duel is None:
        return None
    best = duel.arms[0].name
    return {"best_fixed": best, **_rounded(duel, "bastion", best)}


def _step_curve(phase: Phase, batch_size: int) -> dict[str, Any] | None:
    """Seconds of whole steps by drafted nodes of the batch, for the replay."""
    seconds: dict[float, list[float]] = defaultdict(list)
    for arm in phase.arms:
        if arm.method == "ddtree":
            blocks = phase.blocks(arm.name)
            nodes = sum(b.num_nodes for b in blocks) / sum(b.num_steps for b in blocks)
            seconds[round(nodes, 2)].append(_step_seconds(blocks))
    names = [arm.name for arm in phase.arms]
    plain = next((name for name in (PLAIN, "ar") if name in names), None)
    if not seconds or plain is None:
        return None
    nodes = sorted(seconds)
    return {
        "batch": batch_size,
        "num_nodes": nodes,
        "drafted_seconds": [float(np.median(seconds[n])) for n in nodes],
        "plain_seconds": _step_seconds(phase.blocks(plain)),
    }


def _plain_bound(bench: Bench, batch_size: int) -> float:
    """Tokens per second of plain decoding if passes took what the roofline says, nothing else."""
    shape, speed = bench.target.shape, device_speed(bench.target.device, bench.target.dtype)
    prompt = float(np.mean([len(prompt) for prompt in bench.prompts]))
    context = batch_size * (prompt + bench.config.max_new_tokens / 2)
    load = PassLoad.of(float(batch_size), batch_size, context)
    compute = float(shape.flops(load)) / speed.flops
    memory = float(shape.moved_bytes(load)) / speed.bandwidth
    return round(batch_size / max(compute, memory), 2)
