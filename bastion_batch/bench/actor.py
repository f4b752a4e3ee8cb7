"""What Ray and the worker around an engine cost: the engine in its actor against the engine alone.

    python -m bastion_batch.bench.actor --rounds 3

Both decode the same rows with the same engine, of one thread, pinned to the same core. Alone it is
handed all rows by `generate`, in a process of its own without Ray; in its actor it is fed by a
worker of a real job, which reads, journals, reports and commits between its steps. A run counts
from the engine's first step to its last, so what the worker does between two steps counts in full.
They take turns (alone, actor, actor, alone). The last line of output is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bastion_batch.bench.setup import refuse_loaded_machine
from bastion_batch.cluster.engines import DecodingEngine, PretrainedEngines
from bastion_batch.cluster.node import NodeShare
from bastion_batch.cluster.run import run
from bastion_batch.config import JobConfig, parse_job
from bastion_batch.core.noise import row_key
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.units import row_id
from bastion_batch.records import Completion, Request, RowFault

TURNS = ("alone", "actor", "actor", "alone")
LEAST_RATIO = 0.97


class Pace(NamedTuple):
    """How an engine went from its first step to its last."""

    num_tokens: int
    seconds: float
    step_seconds: float
    """Time inside its steps."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, the time between steps included."""
        return self.num_tokens / self.seconds

    @property
    def idle_share(self) -> float:
        """The part of the time that was spent between steps."""
        return 1 - self.step_seconds / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEngines(PretrainedEngines):
    """Engines pinned to a core, which leave their pace in a file."""

    file: Path
    core: int

    def build(self, job: JobConfig, device: str, share: NodeShare) -> DecodingEngine:
        """An engine that counts."""
        os.sched_setaffinity(0, {self.core})
        engine: Any = PretrainedEngines.build(self, job, device, share)
        step = engine.step
        started: list[float] = []

        def timed() -> list[Completion]:
            if not started:
                started.append(time.perf_counter())
            ended = step()
            totals = engine.totals
            if ended:
                seconds = time.perf_counter() - started[0]
                pace = Pace(totals.num_committed, seconds, totals.step_seconds)
                self.file.write_text(json.dumps(pace))
            return ended

        engine.step = timed
        return engine


def run_alone(job: JobConfig, engines: TimedEngines) -> None:
    """Decode the job's rows without Ray; in a process of its own."""
    engine: Any = engines.build(job, "cpu", NodeShare.of(1, 1, "cpu"))
    for _ in engine.generate(_requests(job, engine.tokenizer)):
        pass


def _requests(job: JobConfig, tokenizer: Any) -> Iterator[Request]:  # noqa: ANN401 - any of them
    renderer = PromptRenderer(job.input, tokenizer)
    [path] = job.input.paths
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines()):
        prompt = renderer.render(json.loads(line))
        assert not isinstance(prompt, RowFault), "the prompts of a measurement are sound"
        name = row_id(0, number)
        yield Request(
            row_id=name,
            prompt_ids=prompt,
            sampling=job.decoding.sampling,
            noise_key=row_key(job.decoding.seed, name, 0),
        )


def measure(
    prompts: Path, num_rows: int, max_new_tokens: int, max_batch: int, rounds: int, core: int
) -> dict[str, Any]:
    """Take turns; returns the ratio of medians, and every run's pace."""
    paces: dict[str, list[Pace]] = {"alone": [], "actor": []}
    with tempfile.TemporaryDirectory() as directory:
        for number, turn in enumerate(TURNS * rounds):
            place = Path(directory) / str(number)
            place.mkdir()
            job = _job(place, prompts, num_rows, max_new_tokens, max_batch)
            engines = TimedEngines(file=place / "pace.json", core=core)
            if turn == "alone":
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    pool.submit(run_alone, job, engines).result()
            else:
                run(job, engines=engines)
            pace = Pace(*json.loads(engines.file.read_text()))
            paces[turn].append(pace)
            sys.stderr.write(f"{turn}: {pace.tokens_per_second:.2f} tokens/s\n")
    speeds = {name: median(p.tokens_per_second for p in of) for name, of in paces.items()}
    return {
        "ratio": speeds["actor"] / speeds["alone"],
        "least_ratio": LEAST_RATIO,
        "tokens_per_second": speeds,
        "idle_share": {name: median(p.idle_share for p in of) for name, of in paces.items()},
        "runs": {name: [pace._asdict() for pace in of] for name, of in paces.items()},
    }


def _job(
    place: Path, prompts: Path, num_rows: int, max_new_tokens: int, max_batch: int
) -> JobConfig:
    lines = prompts.read_text(encoding="utf-8").splitlines()
    path = place / "prompts.jsonl"
    path.write_text("".join(f"{lines[i % len(lines)]}\n" for i in range(num_rows)))
    return parse_job(
        {
            "input": {"path": str(path), "prompt": "prompt"},
            "output": {"path": str(place / "out")},
            "model": {"target": "smollm2-135m-instruct", "dtype": "float32"},
            "decoding": {"max_new_tokens": max_new_tokens},
            "workers": {"count": 1, "device": "cpu", "threads": 1, "max_batch": max_batch},
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report as JSON."""
    parser = argparse.ArgumentParser(description="The engine in its actor against the engine alone")
    parser.add_argument("--prompts", type=Path, default=Path("jobs/data/prompts.jsonl"))
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of four runs")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="on a busy machine too")
    given = parser.parse_args(arguments)
    if not given.force:
        refuse_loaded_machine()
    report = measure(
        given.prompts,
        given.rows,
        given.max_new_tokens,
        given.max_batch,
        given.rounds,
        given.core,
    )
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
