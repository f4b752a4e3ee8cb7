"""The balance on a real machine: two workers of unequal speed, against an equal split of the rows.

One worker decodes in float32 and one in bfloat16, a thread each, as one job with two pools. Both
ways run the same workers on the same rows; only what decides in the coordinator differs. They take
turns (ours, equal, equal, ours), and a run's time counts from the moment both workers are ready.

What an equal split loses follows from the rates that the workers measured while both were busy:
the slower one takes its half alone, where together they would have taken the sum of both.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from bastion_batch.cluster.run import run
from bastion_batch.config import parse_job
from bastion_batch.core.balance import Balance, Eta, Orders, Status, WorkerView
from bastion_batch.errors import InputError
from bastion_batch.io.store import LocalStore
from bastion_batch.run_record import read_record

NUM_WORKERS = 2
NUM_OPEN_UNITS = 3
TURNS = ("ours", "equal", "equal", "ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """What to measure."""

    target: str = "smollm2-135m-instruct"
    drafter: str | None = "default"
    prompts: Path = Path("jobs/data/prompts.jsonl")
    num_rows: int = 200
    """The prompts are taken in turn, as often as it needs."""
    max_new_tokens: int = 64
    max_batch: int = 8
    unit_rows: int = 5
    num_rounds: int = 1
    """Of four turns."""

    def __post_init__(self) -> None:
        if not self.prompts.is_file():
            raise InputError(f"prompts file {self.prompts} does not exist")


class Stopwatch:
    """Begins when all workers are ready; keeps in a file when the last unit so far was done."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ready: set[int] = set()
        self._began: float | None = None

    def is_ready(self, worker: int) -> bool:
        """Whether all workers have asked for work."""
        self._ready.add(worker)
        if len(self._ready) >= NUM_WORKERS and self._began is None:
            self._began = time.monotonic()
        return self._began is not None

    def lap(self) -> None:
        """A unit is done."""
        if self._began is not None:
            self._file.write_text(str(time.monotonic() - self._began), encoding="utf-8")


class Timed(Balance):
    """The balance of every job, which begins when both workers are there."""

    def __init__(self, file: Path, **units: Any) -> None:  # noqa: ANN401 - as Balance
        super().__init__(**units)
        self._watch = Stopwatch(file)

    def lease(self, worker: int, now: float) -> int | None:
        """See `Balance.lease`."""
        return super().lease(worker, now) if self._watch.is_ready(worker) else None

    def finish(self, unit: int) -> None:
        """See `Balance.finish`."""
        super().finish(unit)
        self._watch.lap()


class EqualSplit(Balance):
    """Each worker has an equal part of the rows from the start, and keeps it."""

    def __init__(self, file: Path, **units: Any) -> None:  # noqa: ANN401 - as Balance
        super().__init__(**units)
        self._watch = Stopwatch(file)
        done = set(units.get("done", ()))
        left = [unit for unit in range(len(units["spans"])) if unit not in done]
        half = (len(left) + 1) // NUM_WORKERS
        self._parts = [left[:half], left[half:]]
        self._part_of: dict[int, list[int]] = {}
        self._owner: dict[int, int] = {}

    def lease(self, worker: int, now: float) -> int | None:
        """The next unit of its part."""
        if not self._watch.is_ready(worker):
            return None
        if worker not in self._part_of:
            self._part_of[worker] = self._parts.pop()
        part = self._part_of[worker]
        num_open = sum(owner == worker for owner in self._owner.values())
        if not part or num_open >= NUM_OPEN_UNITS:
            return None
        unit = part.pop(0)
        self._owner[unit] = worker
        return unit

    def finish(self, unit: int) -> None:
        """Its owner may open another."""
        self._owner.pop(unit, None)
        self._watch.lap()

    def give_back(self, units: Iterable[int]) -> None:
        """Nobody else has them."""

    def take_back(self, now: float) -> list[int]:
        """Nothing."""
        return []

    def report(self, worker: int, status: Status, now: float) -> Orders:
        """Go on."""
        return Orders()

    def sick(self, now: float) -> frozenset[int]:
        """Nobody is helped."""
        return frozenset()

    def stuck(self, now: float, no_progress_seconds: float) -> list[int]:
        """Nobody is watched."""
        return []

    def eta(self, now: float) -> Eta | None:
        """Not told."""
        return None

    def workers(self) -> dict[int, WorkerView]:
        """Not told."""
        return {}


class Turn(NamedTuple):
    """One run of the job."""

    policy: str
    seconds: float
    """From both workers' readiness to the last unit."""
    rates: dict[str, float]
    """Tokens per second of step time, by dtype."""
    rows: dict[str, int]
    """Rows that ended at each."""
    num_moved: int
    num_tokens: int
    half_tokens: tuple[int, int]
    """Tokens of the first and of the second half of the rows."""


POLICIES: dict[str, Callable[..., Balance]] = {"ours": Timed, "equal": EqualSplit}


def run_balance(
    config: BalanceConfig, out: Path | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure, and compare what was gained with what the rates predict; JSON-able.

    The report goes into `balance.json` of the directory `out`, too, if there is one.

    Raises:
        InputError: the job cannot be run.
    """
    os.environ["RAY_ADDRESS"] = "local"
    with tempfile.TemporaryDirectory(prefix="bastion-balance-") as directory:
        place = Path(directory)
        _write_prompts(config, place / "prompts.jsonl")
        _turn(config, place, "ours", "warm-up", num_rows=8 * NUM_WORKERS)  # calibrates both
        turns = []
        for number, policy in enumerate(TURNS * config.num_rounds):
            turn = _turn(config, place, policy, f"{number}-{policy}", num_rows=config.num_rows)
            progress(f"{policy}: {turn.seconds:.1f} s, rows {turn.rows}, {turn.num_moved} moved")
            turns.append(turn)
    report = {"setting": _setting(config), **compare(turns)}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "balance.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def compare(turns: Collection[Turn]) -> dict[str, Any]:
    """What was gained over an equal split, and what the rates of our turns predict."""
    ours = [turn for turn in turns if turn.policy == "ours"]
    seconds = {
        policy: median(turn.seconds for turn in turns if turn.policy == policy)
        for policy in POLICIES
    }
    rates = sorted(median(turn.rates[dtype] for turn in ours) for dtype in ("float32", "bfloat16"))
    most = max(ours[0].half_tokens)
    predicted = (most / rates[0]) / (ours[0].num_tokens / sum(rates))
    observed = seconds["equal"] / seconds["ours"]
    return {
        "seconds": seconds,
        "rates": dict(zip(("slower", "faster"), rates, strict=True)),
        "predicted_gain": predicted,
        "observed_gain": observed,
        "observed_over_predicted": observed / predicted,
        "turns": [turn._asdict() for turn in turns],
    }


def balance_table(report: dict[str, Any]) -> str:
    """The report for people."""
    seconds, rates = report["seconds"], report["rates"]
    return "\n".join(
        [
            f"equal split {seconds['equal']:.1f} s, ours {seconds['ours']:.1f} s: "
            f"{report['observed_gain']:.3f}x",
            f"measured rates {rates['slower']:.1f} and {rates['faster']:.1f} tokens/s predict "
            f"{report['predicted_gain']:.3f}x; observed over predicted "
            f"{report['observed_over_predicted']:.3f}",
        ]
    )


def _turn(config: BalanceConfig, place: Path, policy: str, name: str, *, num_rows: int) -> Turn:
    output, watch = place / name, place / f"{name}.seconds"
    prompts = place / f"{name}.jsonl"
    lines = (place / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:num_rows]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pools = [
        {"name": dtype, "count": 1, "device": "cpu", "threads": 1, "dtype": dtype}
        | {"max_batch": config.max_batch}
        for dtype in ("float32", "bfloat16")
    ]
    job = parse_job(
        {
            "input": {"path": str(prompts), "prompt": "prompt"},
            "output": {"path": str(output), "unit_rows": config.unit_rows, "steps": "off"},
            "model": {
                "target": config.target,
                "drafter": config.drafter,
                "allow_mixed_dtype": True,
            },
            "decoding": {"max_new_tokens": config.max_new_tokens},
            "workers": {"pools": pools, "profiles": str(place / "profiles")},
        }
    )
    run(job, balance=partial(POLICIES[policy], watch))
    return _result(policy, output, float(watch.read_text(encoding="utf-8")))


def _result(policy: str, output: Path, seconds: float) -> Turn:
    names = ["row_id", "dtype", "num_output_tokens", "migrations"]
    rows = pq.read_table(output / "data", columns=names).sort_by("row_id").to_pylist()
    record = read_record(LocalStore(output)) or {"invocations": [{"workers": []}]}
    tokens = [row["num_output_tokens"] for row in rows]
    half = len(tokens) // 2
    ended = [row["dtype"].split("+")[-1] for row in rows]
    return Turn(
        policy=policy,
        seconds=seconds,
        rates={
            worker["engine"]["dtype"]: worker["counts"]["num_committed"]
            / worker["counts"]["step_seconds"]
            for worker in record["invocations"][-1]["workers"]
        },
        rows={dtype: ended.count(dtype) for dtype in sorted(set(ended))},
        num_moved=sum(row["migrations"] > 0 for row in rows),
        num_tokens=sum(tokens),
        half_tokens=(sum(tokens[:half]), sum(tokens[half:])),
    )


def _write_prompts(config: BalanceConfig, file: Path) -> None:
    lines = config.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    taken = (prompts[i % len(prompts)] for i in range(config.num_rows))
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in taken), encoding="utf-8")


def _setting(config: BalanceConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in config.__slots__}
    return {"measure": "balance", **values, "prompts": str(config.prompts)}
