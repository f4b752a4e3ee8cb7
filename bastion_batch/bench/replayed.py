"""What was possible: a recording replayed by every policy under the measured cost of steps."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bastion_batch.bench.recording import Recording
from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.core.policies import Adaptive, Fixed, Policy, StepCurve
from bastion_batch.core.replay import Replayed, replay, summarise
from bastion_batch.errors import InputError

ADAPTIVE = "bastion"
"""The engine's own policy: acceptance learnt on the way."""
RAW = "bastion, raw q"
WARM = "bastion, learnt before"
"""The same policy when it has seen all texts once already."""

Progress = Callable[[str], None]


class MeasuredCosts(NamedTuple):
    """What a report of the methods says of one batch size."""

    batch_size: int
    temperature: float
    curve: StepCurve
    measured_over_plain: float | None
    """Of `bastion`, live, over the plain arm that the curve's plain step is of."""


def read_costs(path: Path) -> list[MeasuredCosts]:
    """The costs in the reports of a directory, or in one file of them, by batch size.

    Raises:
        InputError: there are none.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = [costs for file in files for costs in _costs_of(file)]
    if not found:
        raise InputError(f"{path} holds no report of the methods with a cost curve (bench --out)")
    return sorted(found, key=lambda costs: costs.batch_size)


def _costs_of(file: Path) -> Iterator[MeasuredCosts]:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is no report of the benchmark: {error}") from None
    for part in report.get("batches", []):
        curve = part.get("step_curve")
        if curve is not None:
            yield MeasuredCosts(
                part["batch"],
                report["setting"]["temperature"],
                StepCurve(
                    np.array(curve["num_nodes"], np.float64),
                    np.array(curve["drafted_seconds"], np.float64),
                    curve["plain_seconds"],
                ),
                _measured_gain(part),
            )


def _measured_gain(part: dict[str, Any]) -> float | None:
    ratios = part["ratios"]
    for plain in ("ar-alone", "ar"):
        if f"bastion/{plain}" in ratios:
            return ratios[f"bastion/{plain}"]["pooled"]
    return None


def replay_all(
    recording: Recording, costs: Iterable[MeasuredCosts], progress: Progress
) -> dict[str, Any]:
    """Every policy at every batch size that was measured; JSON-able."""
    return {
        "recording": recording.setting,
        "num_texts": len(recording.texts),
        "replays": [_replay_batch(recording, each, progress) for each in costs],
    }


def _replay_batch(recording: Recording, costs: MeasuredCosts, progress: Progress) -> dict[str, Any]:
    size = costs.batch_size
    texts = recording.texts * math.ceil(size / len(recording.texts))  # as live: over and over
    results: dict[str, Replayed] = {}
    for name, policy in _policies(recording, costs):
        steps = replay(texts, policy, size, recording.end_ids, recording.group)
        results[name] = summarise(steps, costs.curve, size)
        progress(f"batch {size}, {name}: {results[name].over_plain:.3f} x plain")
    best = max(results, key=lambda name: results[name].over_plain)
    optimum = results[best].over_plain
    is_like = costs.temperature == recording.setting["temperature"]
    measured = costs.measured_over_plain if is_like else None
    return {
        "batch": size,
        "policies": {
            name: {key: round(value, 4) for key, value in result._asdict().items()}
            for name, result in results.items()
        },
        "best_policy": best,
        "optimum_over_plain": round(optimum, 4),
        "calibrated_over_raw": round(results[ADAPTIVE].over_plain / results[RAW].over_plain, 4),
        "measured_over_plain": measured,
        "measured_over_optimum": None if measured is None else round(measured / optimum, 4),
    }


def _policies(recording: Recording, costs: MeasuredCosts) -> Iterator[tuple[str, Policy]]:
    depth = recording.texts[0].log_probs_PDK.shape[1]
    yield "ar", Fixed(0)
    yield "dflash", Fixed(None)
    for num_nodes in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
        if num_nodes * costs.batch_size <= max(512, costs.batch_size):
            yield f"ddtree-{num_nodes}", Fixed(num_nodes)
    yield RAW, Adaptive(costs.curve, recording.group)
    acceptance = AcceptanceModel(depth)
    yield ADAPTIVE, Adaptive(costs.curve, recording.group, acceptance)
    yield WARM, Adaptive(costs.curve, recording.group, acceptance)


def replay_table(report: dict[str, Any]) -> str:
    """The replays for people, a line per policy."""
    lines = []
    for part in report["replays"]:
        lines.append(
            f"{'batch ' + str(part['batch']):<24}{'tok/step':>10}{'nodes':>8}{'over plain':>12}"
            f"{'expected/realised':>20}"
        )
        for name, result in part["policies"].items():
            lines.append(
                f"{name:<24}{result['tokens_per_step']:>10.3f}{result['nodes_per_row_step']:>8.1f}"
                f"{result['over_plain']:>12.3f}{result['expected_over_realised']:>20.3f}"
            )
        measured = part["measured_over_plain"]
        lines.append(f"learnt acceptance over raw q: {part['calibrated_over_raw']:.3f} x")
        lines.append(
            f"best: {part['best_policy']}, {part['optimum_over_plain']:.3f} x plain; measured live: "
            + (f"{measured:.3f} x" if measured is not None else "-")
            + (f", {part['measured_over_optimum']:.3f} of it" if measured is not None else "")
        )
    return "\n".join(lines)
