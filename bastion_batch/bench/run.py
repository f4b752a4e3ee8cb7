"""One benchmark: load a target, decode the same prompts with every method, report ratios."""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from bastion_batch.bench.methods import (
    Arm,
    ArmRun,
    Prompt,
    alternate,
    engine_arm,
    speed_ratio,
    transformers_arm,
)
from bastion_batch.engine import Engine
from bastion_batch.engine.checkpoints import load_tokenizer, resolve_drafter, resolve_target
from bastion_batch.engine.device import device_name, pick_device, pick_dtype
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.target import Target
from bastion_batch.errors import InputError
from bastion_batch.records import Method

ARMS = ("ar", "dflash", "ddtree", "bastion", "transformers")
PEER = "transformers"
"""The arm that is transformers' own `generate`, one prompt at a time."""
MAX_BUSY_PERCENT = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    target: str = "smollm2-135m-instruct"
    drafter: str | None = "default"
    """None: every arm decodes plainly."""
    prompts: Path = Path("jobs/data/prompts.jsonl")
    """JSON lines with a field `prompt`."""
    methods: tuple[str, ...] = ("ar", "dflash", "ddtree", "bastion")
    """Arms; `transformers` is the peer."""
    batch: int = 1
    num_prompts: int = 16
    group_size: int = 2
    """Prompts that every arm decodes before the next group."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "auto"
    threads: int | None = None
    nodes_per_row: int = 16


def refuse_loaded_machine() -> None:
    """Raise unless the processors are idle: a timing on a loaded machine is a wrong number.

    Raises:
        InputError: naming how busy the machine is.
    """
    busy = psutil.cpu_percent(interval=1.0)
    if busy > MAX_BUSY_PERCENT:
        raise InputError(
            f"the machine's processors are {busy:.0f} % busy, over {MAX_BUSY_PERCENT:.0f} %: "
            "stop what runs, or pass --force to time anyway"
        )


def run_bench(
    config: BenchConfig, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure and return the report, JSON-able: setting, arms, and ratios to `ar` and to the peer.

    Raises:
        InputError: an arm or the prompts file is unknown, or the target cannot be used.
    """
    unknown = [name for name in config.methods if name not in ARMS]
    if unknown:
        raise InputError(f"unknown methods {', '.join(unknown)}; known: {', '.join(ARMS)}")
    if not config.prompts.is_file():
        raise InputError(f"prompts file {config.prompts} does not exist")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device("auto")
    files = resolve_target(config.target)
    target = Target.load(files.path, pick_dtype(config.dtype, device), device)
    prompts = list(_prompts(config, files.path))[: config.num_prompts]
    size = max(config.group_size, config.batch)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    runs = alternate(_arms(config, target, files.path), groups, progress)
    return {
        "setting": _setting(config, target),
        "arms": {name: _arm_report(arm) for name, arm in runs.items()},
        "ratios": _ratios(runs),
        "same_text": _same_text(runs),
    }


def _arms(config: BenchConfig, target: Target, path: Path) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for name in config.methods:
        if name == PEER:
            from transformers import AutoModelForCausalLM

            module = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
            module = module.to(target.device).eval()
            arms[name] = transformers_arm(module, sorted(target.ids.end), config.max_new_tokens)
            continue
        files = resolve_drafter(config.drafter, config.target)
        engine = Engine(
            target,
            DFlashDrafter.load(files.path, target) if files and name != "ar" else None,
            method=cast(Method, name),
            nodes_per_row=config.nodes_per_row,
            max_batch=config.batch,
        )
        arms[name] = engine_arm(engine, config.max_new_tokens, config.temperature)
    return arms


def _prompts(config: BenchConfig, path: Path) -> Iterator[Prompt]:
    tokenizer = load_tokenizer(path)
    for line in config.prompts.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["prompt"]
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        yield tuple(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])


def _setting(config: BenchConfig, target: Target) -> dict[str, Any]:
    return {
        **{name: _plain(getattr(config, name)) for name in config.__slots__},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def _plain(value: Any) -> Any:  # noqa: ANN401
    return str(value) if isinstance(value, Path) else value


def _arm_report(runs: Sequence[ArmRun]) -> dict[str, Any]:
    tokens = sum(run.num_tokens for run in runs)
    report: dict[str, Any] = {
        "tokens": tokens,
        "tokens_per_second": round(tokens / sum(run.seconds for run in runs), 2),
    }
    totals = [run.totals for run in runs if run.totals is not None]
    row_steps = sum(t.num_row_steps for t in totals)
    if row_steps:
        report["tokens_per_step"] = round(sum(t.num_decoded for t in totals) / row_steps, 3)
        report["nodes_per_row_step"] = round(sum(t.num_nodes for t in totals) / row_steps, 2)
    return report


def _ratios(runs: dict[str, list[ArmRun]]) -> dict[str, Any]:
    """Each arm over `ar`, and each over the peer, where those were measured."""
    ratios = {}
    for baseline in ("ar", PEER):
        for name in runs:
            if baseline in runs and name != baseline:
                ratio = speed_ratio(runs[name], runs[baseline])
                ratios[f"{name}/{baseline}"] = {k: round(v, 3) for k, v in ratio._asdict().items()}
    return ratios


def _same_text(runs: dict[str, list[ArmRun]]) -> dict[str, float]:
    """Share of prompts on which an arm's text equals that of the first arm."""
    first = [out for run in next(iter(runs.values())) for out in run.outputs]
    return {
        name: round(
            sum(a == b for a, b in zip(first, (o for r in arm for o in r.outputs), strict=True))
            / len(first),
            3,
        )
        for name, arm in runs.items()
    }


def table(report: dict[str, Any]) -> str:
    """The report for people: a line per arm, with its speed over `ar` and over the peer."""
    lines = [
        f"{'':<14}{'tokens/s':>10}{'tok/step':>10}{'nodes':>8}{'over ar':>18}{'over peer':>18}"
    ]
    for name, arm in report["arms"].items():
        ratios = (_shown(report["ratios"].get(f"{name}/{base}")) for base in ("ar", PEER))
        lines.append(
            f"{name:<14}{arm['tokens_per_second']:>10.1f}"
            f"{arm.get('tokens_per_step', 1.0):>10.2f}{arm.get('nodes_per_row_step', 0.0):>8.1f}"
            + "".join(f"{ratio:>18}" for ratio in ratios)
        )
    setting = report["setting"]
    lines.append(
        f"{setting['device']}, {setting['dtype']}, {setting['threads']} threads, "
        f"batch {setting['batch']}, temperature {setting['temperature']}; "
        "ratios: median of paired groups, 90 % interval"
    )
    return "\n".join(lines)


def _shown(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-"
