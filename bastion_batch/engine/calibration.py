"""The thorough calibration of a pair of models on this device, as a report and a profile.

Predictions in the report are for passes that the predicting model has not seen: the timings are
split in two, and each half is predicted by a model fitted to the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bastion_batch.core.latency import LatencyModel
from bastion_batch.core.roofline import Timing
from bastion_batch.engine.checkpoints import resolve_drafter, resolve_target
from bastion_batch.engine.device import device_name, pick_device, pick_dtype
from bastion_batch.engine.drafters.loading import load_drafter
from bastion_batch.engine.latency import measure
from bastion_batch.engine.profiles import Profile, load_profile, profile_key, save_profile
from bastion_batch.engine.target import Target

SHOWN_COEFFICIENTS = (
    "alpha_compute",
    "beta_compute_seconds",
    "alpha_memory",
    "beta_memory_seconds",
    "alpha_attention_compute",
    "alpha_attention_memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """What to calibrate."""

    target: str
    drafter: str | None = "default"
    """None: only the target's pass is timed."""
    dtype: str = "auto"
    threads: int | None = None
    device: str = "auto"
    thorough: bool = True
    """In up to 60 seconds; else in up to 15, as an engine does when it starts."""


def run_calibration(config: CalibrationConfig) -> dict[str, Any]:
    """Calibrate, save the profile, and return the report, JSON-able.

    Sets the number of threads of this process. What an earlier profile knows of the drafter's
    acceptance is kept.

    Raises:
        ModelError: a model cannot be used.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("highest")
    device = pick_device(config.device)
    files = resolve_target(config.target)
    draft_files = resolve_drafter(config.drafter, config.target)
    target = Target.load(files.path, pick_dtype(config.dtype, device), device)
    drafter = load_drafter(draft_files.path, target) if draft_files else None
    costs, verify_timings, draft_timings = measure(target, drafter, thorough=config.thorough)
    key = profile_key(target, files.digest, draft_files.digest if draft_files else None)
    known = load_profile(key)
    profile = Profile(
        key=key, costs=costs.to_dict(), acceptance=known.acceptance if known else None
    )
    path = save_profile(profile)
    return {
        "target": files.name,
        "drafter": draft_files.name if draft_files else None,
        "device": device_name(device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "verify": _measured(costs.verify, verify_timings),
        "draft": _measured(costs.draft, draft_timings) if costs.draft else [],
        "models": costs.summary(),
        "profile": str(path) if path else None,
    }


def table(report: dict[str, Any]) -> str:
    """The report for people: a line per timed pass, and what was fitted."""
    lines = []
    for kind in ("verify", "draft"):
        if report[kind]:
            lines += [*_timing_lines(kind, report[kind]), *_model_lines(report["models"][kind]), ""]
    lines.append(
        f"{report['target']} with {report['drafter'] or 'no drafter'}: {report['device']}, "
        f"{report['dtype']}, {report['threads']} threads"
    )
    lines.append(f"profile: {report['profile'] or 'not saved'}")
    return "\n".join(lines)


def _measured(model: LatencyModel, timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """The timings with what a model of the other half predicts, by tokens, rows and context."""
    halves = [timings[0::2], timings[1::2]]
    predicted: dict[Timing, float] = {}
    for seen, unseen in (halves, halves[::-1]):
        if seen:
            other = LatencyModel(model.shape, model.speed)
            other.fit(seen)
            for timing in unseen:
                predicted[timing] = other.seconds(*timing[:3])
    return [
        {**t._asdict(), "predicted_seconds": predicted.get(t)}
        for t in sorted(timings, key=lambda t: (t.context_tokens // t.num_rows, t.num_rows, t))
    ]


def _timing_lines(kind: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"{kind:<8}{'tokens':>7}{'rows':>6}{'context':>9}{'measured':>12}{'predicted':>12}{'error':>8}"
    ]
    for row in rows:
        seconds, predicted = row["seconds"], row["predicted_seconds"]
        guess = f"{'-':>12}{'-':>8}"
        if predicted is not None:
            guess = f"{predicted * 1e3:>9.2f} ms{100 * (predicted / seconds - 1):>6.1f} %"
        context = row["context_tokens"] // row["num_rows"]
        lines.append(
            f"{'':<8}{row['num_tokens']:>7}{row['num_rows']:>6}{context:>9}"
            f"{seconds * 1e3:>9.2f} ms{guess}"
        )
    return lines


def _model_lines(model: dict[str, Any]) -> list[str]:
    """Coefficients, and which parts of the roofline ever bound."""
    fitted = [f"{name} {model[name]:.4g}" for name in SHOWN_COEFFICIENTS if model[name] is not None]
    unknown = model["unidentified"]
    return [
        f"peak {model['peak_flops'] / 1e12:.4g} TFLOP/s, "
        f"bandwidth {model['bandwidth_bytes_per_second'] / 1e9:.4g} GB/s "
        f"({model['speed_source']})",
        ", ".join(fitted) or "the data sheet's roofline, unfitted",
        f"never bound in the timings: {', '.join(unknown)}" if unknown else "every part bound",
    ]
