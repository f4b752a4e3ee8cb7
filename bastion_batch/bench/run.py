"""One benchmark from its configuration to its report, table and files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from bastion_batch.bench import recording
from bastion_batch.bench.checks import measure_overhead, measure_useless
from bastion_batch.bench.drafter import drafter_lines, measure_drafter
from bastion_batch.bench.envelope import measure_methods
from bastion_batch.bench.flatness import measure_flatness
from bastion_batch.bench.peers import measure_peers
from bastion_batch.bench.picture import draw, require_matplotlib
from bastion_batch.bench.prediction import measure_prediction
from bastion_batch.bench.setup import Bench, BenchConfig
from bastion_batch.engine.drafters import Drafter
from bastion_batch.errors import InputError

Progress = Callable[[str], None]

MEASURES: dict[str, Callable[[Bench, int, Progress], dict[str, Any]]] = {
    "methods": measure_methods,
    "useless": measure_useless,
    "overhead": measure_overhead,
    "flatness": measure_flatness,
    "peers": measure_peers,
    "drafter": measure_drafter,
    "prediction": measure_prediction,
}

UNTIMED = frozenset({"drafter"})
"""Measures that say the same on a busy machine; of `drafter`, that is its chain and fixed trees."""

PICTURED = "methods"
"""The measure whose files make a picture."""


def run_bench(
    config: BenchConfig,
    measure: str = "methods",
    out: Path | None = None,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Measure every batch size and return the report, JSON-able.

    With `out`, each batch size is a file there as soon as it is measured, and the picture is drawn
    of all that lie there: a measurement may be made in pieces.

    Raises:
        InputError: the configuration cannot be measured.
        ModelError: a model cannot be used.
    """
    if measure not in MEASURES:
        raise InputError(f"unknown measure {measure}; known: {', '.join(MEASURES)}")
    if out is not None and measure == PICTURED:
        require_matplotlib()
    bench = Bench.load(config)
    setting = {"measure": measure, **bench.setting()}
    parts = []
    for size in config.batches:
        part = MEASURES[measure](bench, size, lambda line, n=size: progress(f"batch {n}: {line}"))
        parts.append(part)
        if out is not None:
            _write(out, {"setting": setting, "batches": [part]})
    return {"setting": setting, "batches": parts}


def run_record(
    config: BenchConfig, path: Path, progress: Progress = lambda line: None
) -> dict[str, Any]:
    """Record the texts on which the methods are compared, for `--replay`; returns what was written."""
    bench = Bench.load(config)
    size = max(config.batches)
    drafter = recording.RecordingDrafter(bench.drafter())
    engine = bench.engine(size, cast(Drafter, drafter), "ddtree")
    recorded = recording.record(
        engine, drafter, bench.comparing_prompts, config.sampling, bench.setting(), progress
    )
    recording.save(recorded, path)
    return {
        "file": str(path),
        "num_texts": len(recorded.texts),
        "num_positions": sum(text.num_positions for text in recorded.texts),
    }


def _write(out: Path, report: dict[str, Any]) -> None:
    """One batch size's file, and the picture of all of its setting."""
    out.mkdir(parents=True, exist_ok=True)
    setting = report["setting"]
    stem = f"{setting['measure']}-{setting['dtype']}-t{setting['temperature']:g}"
    if setting["measure"] in UNTIMED:
        stem += f"-{Path(setting['prompts']).name.partition('.')[0].lower()}"
    size = report["batches"][0]["batch"]
    (out / f"{stem}-b{size}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if setting["measure"] == PICTURED:
        files = sorted(out.glob(f"{stem}-b*.json"))
        draw([json.loads(f.read_text(encoding="utf-8")) for f in files], out / f"{stem}.png")


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    for part in report["batches"]:
        lines.append(f"batch {part['batch']}")
        if "arms" in part:
            lines += _methods_lines(part)
        for kind, workload in part.get("workloads", {}).items():
            lines += _peer_lines(kind, workload)
        if "drafter" in part:
            lines += drafter_lines(part["drafter"])
        for check in ("overhead", "flatness", "useless", "prediction"):
            if check in part:
                lines.append(json.dumps(part[check], indent=1))
    setting = report["setting"]
    lines.append(
        f"{setting['device']}, {setting['dtype']}, {setting['threads']} threads, "
        f"temperature {setting['temperature']:g}; ratios: median over paired groups (90 % interval)"
    )
    return "\n".join(lines)


def _methods_lines(part: dict[str, Any]) -> list[str]:
    lines = [f"{'':<14}{'tokens/s':>10}{'tok/step':>10}{'nodes':>8}{'over ar':>20}"]
    for name, arm in part["arms"].items():
        lines.append(
            f"{name:<14}{arm['tokens_per_second']:>10.1f}{arm['tokens_per_step']:>10.2f}"
            f"{arm['nodes_per_row_step']:>8.1f}{_shown(part['ratios'].get(f'{name}/ar')):>20}"
        )
    envelope = part["envelope"]
    if envelope is not None:
        lines.append(
            f"bastion over the best fixed arm, {envelope['best_fixed']}: {_shown(envelope)}, "
            f"pooled {envelope['pooled']:.3f} "
            f"({envelope['pooled_low']:.3f}-{envelope['pooled_high']:.3f})"
        )
    if part["acceptance"] is not None:
        lines.append(
            "expected over realised tokens per step: "
            f"{part['acceptance']['expected_over_realised']:.3f} over "
            f"{part['acceptance']['num_row_steps']} row-steps "
            f"(raw q: {part['acceptance']['raw_expected_over_realised']:.3f})"
        )
    return lines


def _peer_lines(kind: str, workload: dict[str, Any]) -> list[str]:
    lines = [f"{kind:<16}{'tokens/s':>10}{'same text':>11}"]
    for name, arm in workload["arms"].items():
        lines.append(f"{name:<16}{arm['tokens_per_second']:>10.1f}{arm['same_text']:>11.2f}")
    lines += [f"{pair}: {_shown(ratio)}" for pair, ratio in workload["ratios"].items()]
    return lines


def _shown(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})" if ratio else "-"
