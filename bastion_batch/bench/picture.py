"""The picture of a benchmark: throughput by batch size, a line per method, and plain decoding's bound."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bastion_batch.errors import InputError

LINES = (
    ("ar", "ar (plain)", "o"),
    ("dflash", "dflash (chain)", "s"),
    ("ddtree", "ddtree (best fixed tree)", "^"),
    ("bastion", "bastion", "D"),
)


def require_matplotlib() -> None:
    """Raise, before anything is measured, if pictures cannot be drawn.

    Raises:
        InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "a picture needs matplotlib: pip install 'bastion_batch[notebook]', or leave out --out"
        )


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of some reports' batch sizes as a PNG."""
    from matplotlib.figure import Figure

    parts = sorted((part for r in reports for part in r["batches"]), key=lambda p: p["batch"])
    setting = reports[0]["setting"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for prefix, label, marker in LINES:
        points = [(part["batch"], speed) for part in parts if (speed := _speed(part, prefix))]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    bound = [(part["batch"], part["plain_roofline_tokens_per_second"]) for part in parts]
    axes.plot(*zip(*bound, strict=True), "k--", linewidth=1, label="roofline of plain decoding")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [part["batch"] for part in parts]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("batch size (rows)")
    axes.set_ylabel("output tokens per second")
    axes.set_title(
        f"{setting['target']}, {setting['dtype']}, temperature {setting['temperature']:g}\n"
        f"{setting['device']}, {setting['threads']} threads",
        fontsize=9,
    )
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _speed(part: dict[str, Any], prefix: str) -> float | None:
    """Tokens per second of the fastest arm of a method."""
    found = [
        arm["tokens_per_second"]
        for name, arm in part["arms"].items()
        if name.partition("-")[0] == prefix
    ]
    return max(found, default=None)
