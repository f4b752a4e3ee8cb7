"""What a drafter is worth: tokens per step of the engine, by method and by kind of prompt.

Tokens per step are committed tokens over decode steps of a row; a prompt's own pass and the token
that ends it count in neither. Of the chain and of trees of a fixed size they depend on the models
and the prompts alone, in float32; `bastion` sizes its trees by what passes take, so that its figure
depends on the machine and the batch, and what it gains is measured by `methods`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bastion_batch.bench.setup import Bench
from bastion_batch.records import Completion, Method, Request

TREE_NODES = 64
NUM_RESAMPLES = 2000
INTERVAL = (0.05, 0.95)

Progress = Callable[[str], None]


class _Method(NamedTuple):
    name: str
    method: Method
    nodes_per_row: int


METHODS = (
    _Method("dflash", "dflash", 1),
    _Method(f"ddtree-{TREE_NODES}", "ddtree", TREE_NODES),
    _Method("bastion", "bastion", 1),
)


class _Answer(NamedTuple):
    """What one prompt's answer took."""

    kind: str
    num_decoded: int
    """Tokens committed in decode steps."""
    num_steps: int
    accepted: tuple[int, ...]
    """Drafted tokens accepted in each of them."""


def measure_drafter(bench: Bench, batch_size: int, progress: Progress) -> dict[str, Any]:
    """Decode every prompt by every method that drafts; JSON-able."""
    engine = bench.engine(batch_size, bench.drafter(), "dflash")
    requests = [
        Request(
            row_id=str(number), prompt_ids=ids, sampling=bench.config.sampling, noise_key=number
        )
        for number, ids in enumerate(bench.prompts)
        if engine.check(len(ids)) is None
    ]
    reports = {}
    for one in METHODS:
        if one.method not in bench.config.methods:
            continue
        engine.use(one.method, one.nodes_per_row)
        answers = [
            _answer(completion, bench.kinds[int(completion.row_id)])
            for completion in engine.generate(requests)
        ]
        reports[one.name] = report(answers)
        progress(f"{one.name}: {reports[one.name]['all']['tokens_per_step']:.3f} tokens per step")
    return {"batch": batch_size, "drafter": reports}


def _answer(completion: Completion, kind: str) -> _Answer:
    steps = [record for record in completion.records if record.method != "prefill"]
    return _Answer(
        kind,
        sum(record.num_committed for record in steps),
        len(steps),
        tuple(record.num_accepted for record in steps),
    )


def report(answers: Sequence[_Answer]) -> dict[str, Any]:
    """Tokens per step over all prompts, and over those of each kind."""
    counted = [answer for answer in answers if answer.num_steps]
    kinds = sorted({answer.kind for answer in counted})
    return {
        "all": _figures(counted) | {"accepted_at_depth": _accepted(counted)},
        "kinds": {kind: _figures([a for a in counted if a.kind == kind]) for kind in kinds},
    }


def _figures(answers: Sequence[_Answer]) -> dict[str, Any]:
    """Of some prompts; the interval is a bootstrap over prompts."""
    decoded = np.array([answer.num_decoded for answer in answers])
    steps = np.array([answer.num_steps for answer in answers])
    draws = np.random.default_rng(0).integers(0, len(answers), (NUM_RESAMPLES, len(answers)))
    low, high = np.quantile(decoded[draws].sum(1) / steps[draws].sum(1), INTERVAL)
    return {
        "num_prompts": len(answers),
        "num_steps": int(steps.sum()),
        "tokens_per_step": round(float(decoded.sum() / steps.sum()), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "mean_of_prompts": round(float((decoded / steps).mean()), 4),
    }


def _accepted(answers: Iterable[_Answer]) -> list[float]:
    """The share of steps in which at least 1, 2, ... drafted tokens were accepted."""
    accepted = np.array([count for answer in answers for count in answer.accepted])
    return [round(float((accepted >= depth).mean()), 4) for depth in range(1, accepted.max() + 1)]


def drafter_lines(reports: dict[str, Any]) -> list[str]:
    """The report for people."""
    names = list(reports)
    lines = [f"{'':<14}{'prompts':>8}" + "".join(f"{name:>22}" for name in names)]
    first = reports[names[0]]
    for kind in ("all", *first["kinds"]):
        found = [r["all"] if kind == "all" else r["kinds"][kind] for r in reports.values()]
        shown = "".join(
            f"{f['tokens_per_step']:>9.2f} ({f['low']:.2f}-{f['high']:.2f})" for f in found
        )
        lines.append(f"{kind:<14}{found[0]['num_prompts']:>8}{shown}")
    for name in names:
        shares = ", ".join(f"{share:.2f}" for share in reports[name]["all"]["accepted_at_depth"])
        lines.append(f"{name}: at least 1, 2, ... drafted tokens accepted in {shares} of the steps")
    return lines
