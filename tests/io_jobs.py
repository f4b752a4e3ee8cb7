"""Small jobs and a decoder without a model, for the tests of files in and out."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bastion_batch.config import JobConfig, parse_job
from bastion_batch.io.commit import Commit, commit_unit
from bastion_batch.io.plan import Plan
from bastion_batch.io.planning import open_plan
from bastion_batch.io.reader import UnitReader, UnitRows
from bastion_batch.io.sinks import Tables, UnitBuilder
from bastion_batch.io.store import Output
from bastion_batch.records import Completion, StepRecord, StepTiming


class Target(NamedTuple):
    name: str = "tiny"
    digest: str = "d1"


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows; bytes are written as they are, as one line."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def make_job(input_path: object, output: object, **changes: Any) -> JobConfig:
    """A job; changes are given as section__field=value."""
    paths = [str(p) for p in input_path] if isinstance(input_path, list) else str(input_path)
    tree: dict[str, dict[str, Any]] = {
        "input": {"path": paths, "prompt": "prompt"},
        "output": {"path": str(output)},
        "model": {"target": "tiny"},
        "decoding": {},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        tree[section][field] = value
    return parse_job(tree)


def planned(tmp_path: Path, num_rows: int = 10, **changes: Any) -> Plan:
    """A planned job over rows with a prompt, in ``tmp_path/out``."""
    rows = [{"prompt": f"say {i}", "id": i} for i in range(num_rows)]
    file = write_jsonl(tmp_path / "in.jsonl", rows)
    return open_plan(make_job(file, tmp_path / "out", **changes), Target())


def step_record(step: int, *, method: str = "bastion", num_committed: int = 2) -> StepRecord:
    """A plausible record of one row in one step."""
    timing = StepTiming(step, "bastion", 4, 12, 0, 0.5, 0.75, 0.0, 0.1, 0.1, 0.2, 0.1, 0.0, 0.5)
    return StepRecord(timing, method, 9, 3, 2, 2, num_committed - 1, num_committed, 1.5, 1.75)


def completion(row_id: str, sample: int = 0, *, text: str | None = None) -> Completion:
    """Prefill and two steps of two tokens."""
    records = (
        step_record(0, method="prefill", num_committed=1),
        step_record(1),
        step_record(2),
    )
    return Completion(
        row_id=row_id,
        sample_index=sample,
        output_ids=(1, 2, 3, 4, 5),
        text=f"answer {row_id} {sample}" if text is None else text,
        finish_reason="stop",
        num_prompt_tokens=7,
        num_steps=2,
        records=records,
    )


def read(plan: Plan, unit: int) -> UnitRows:
    """Read one unit by itself."""
    with UnitReader(plan) as reader:
        return reader.read(unit)


def answer(plan: Plan, unit: int, attempt: int = 1) -> Tables:
    """Read a unit and answer all its rows."""
    rows = read(plan, unit)
    builder = UnitBuilder(plan, unit, rows, worker=f"w{attempt}", attempt=attempt, device="cpu")
    for position, sample in list(builder.pending()):
        builder.add(completion(rows.row_ids[position], sample))
    return builder.tables()


def run_unit(output: Output, plan: Plan, unit: int, attempt: int = 1, **hooks: Any) -> Commit:
    """Answer and commit one unit."""
    data, steps = answer(plan, unit, attempt)
    return commit_unit(output, plan, unit, attempt, data, steps, **hooks)


def run_all(output: Output, plan: Plan) -> None:
    """Answer and commit every unit."""
    for unit in range(plan.num_units):
        run_unit(output, plan, unit)
