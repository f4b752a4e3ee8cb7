"""A store in memory that checks its promises after every change: `data/` is right at any moment."""

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from fault_store import MemoryStore

from bastion_batch.cluster.scripted import LetterTokenizer, ScriptedEngines, scripted_ids
from bastion_batch.config import JobConfig
from bastion_batch.core.noise import row_key
from bastion_batch.io.layout import DATA, STEPS, data_name, unit_of
from bastion_batch.io.plan import Plan
from bastion_batch.io.planning import make_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitReader
from bastion_batch.records import Request, RowFault
from simulation.world import Violation

DECIDED = (
    "id",
    "prompt",
    "row_id",
    "sample_index",
    "output",
    "finish_reason",
    "error_kind",
    "num_prompt_tokens",
    "num_output_tokens",
)
"""Columns of `data/` that no schedule may change."""

RowKey = tuple[str, int]


class Reference(NamedTuple):
    """What `data/` must say, whatever happens on the way."""

    units: list[pa.Table]
    num_tokens: list[dict[RowKey, int]]
    """Of each unit's outputs that are no errors."""


def _read(payload: bytes) -> pa.Table:
    with pq.ParquetFile(io.BytesIO(payload)) as file:
        return file.read(use_threads=False)


def reference(job: JobConfig) -> Reference:
    """The answers of the scripted engine, found without any of the code under test."""
    engines = ScriptedEngines()
    plan = make_plan(job, engines.check(job))
    renderer = PromptRenderer(job.input, LetterTokenizer())
    tables, tokens = [], []
    with UnitReader(plan) as reader:
        for unit in range(plan.num_units):
            rows = reader.read(unit)
            answers = [
                _answer(job, row_id, sample, rows.row(i), renderer)
                for i, row_id in enumerate(rows.row_ids)
                for sample in range(plan.samples_per_row)
            ]
            schema = pa.schema([plan.data_schema.field(name) for name in DECIDED])
            tables.append(pa.Table.from_pylist(answers, schema=schema))
            tokens.append(
                {
                    (a["row_id"], a["sample_index"]): a["num_output_tokens"]
                    for a in answers
                    if a["finish_reason"] != "error"
                }
            )
    return Reference(tables, tokens)


def _answer(job, row_id, sample, row, renderer):
    answer = {"id": row["id"], "prompt": row["prompt"], "row_id": row_id, "sample_index": sample}
    prompt = renderer.render(row)
    if isinstance(prompt, RowFault):
        failed = {"finish_reason": "error", "error_kind": prompt.kind}
        return answer | failed | {"num_prompt_tokens": 0, "num_output_tokens": 0}
    sampling = job.decoding.sampling
    ids = scripted_ids(
        Request(
            row_id=row_id,
            sample_index=sample,
            prompt_ids=prompt,
            sampling=sampling,
            noise_key=row_key(job.decoding.seed, row_id, sample),
        )
    )
    return answer | {
        "output": bytes(ids).decode(),
        "finish_reason": "length" if len(ids) == sampling.max_new_tokens else "stop",
        "num_prompt_tokens": len(prompt),
        "num_output_tokens": len(ids),
    }


@dataclass
class _Standing:
    """A data file that stands."""

    attempt: int
    steps: tuple[str, ...]


class WatchedStore(MemoryStore):
    """Raises `Violation` at the change that breaks a promise."""

    def __init__(self, expected: Reference, *, conditional: bool) -> None:
        super().__init__(conditional=conditional)
        self.may_be_poison: Callable[[RowKey], bool] = lambda key: False
        self._expected = expected
        self._standing: dict[str, _Standing] = {}

    @cached_property
    def job_id(self) -> str:
        """The plan's, which never changes."""
        return json.loads(self.contents["_bastion/plan.json"])["job_id"]

    @property
    def named_steps(self) -> set[str]:
        """The steps files that count."""
        return {name for standing in self._standing.values() for name in standing.steps}

    def open_units(self) -> list[int]:
        """The units that have no file."""
        units = range(len(self._expected.units))
        return [unit for unit in units if data_name(unit) not in self.contents]

    def rows_of(self, unit: int) -> list[RowKey]:
        """What is to be decoded of a unit."""
        return list(self._expected.num_tokens[unit])

    def put(self, name, payload):
        replaced = self.contents.get(name)
        super().put(name, payload)
        if name.startswith(f"{DATA}/"):
            if replaced is not None and self.conditional:
                raise Violation(f"{name} was replaced")
            self._check_data(name)
        if name in self.named_steps:
            for data in [d for d, s in self._standing.items() if name in s.steps]:
                self._check_data(data)

    def remove(self, name):
        super().remove(name)
        if name.startswith(f"{DATA}/"):
            raise Violation(f"{name} was removed")
        if name in self.named_steps:
            raise Violation(f"{name} was removed, and a data file names it")

    def require_complete(self, plan: Plan) -> None:
        """Every unit is there, and nothing else."""
        present = set(self.names(DATA))
        wanted = {data_name(unit) for unit in range(plan.num_units)}
        if present != wanted:
            raise Violation(f"{DATA}/ holds {sorted(present)}, not {sorted(wanted)}")

    def _check_data(self, name: str) -> None:
        unit = unit_of(name)
        if unit is None:
            raise Violation(f"{name} is no unit")
        try:
            table = _read(self.contents[name])
            footer = json.loads(table.schema.metadata[b"bastion_batch"])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise Violation(f"{name} cannot be read: {error!r}") from None
        if (footer["job_id"], footer["unit"]) != (self.job_id, unit):
            raise Violation(f"{name} says that it is unit {footer['unit']}")
        found, expected = table.select(list(DECIDED)), self._expected.units[unit]
        if not found.equals(expected) and not self._is_poisoned(found, expected):
            raise Violation(f"{name} has other rows than it should: {found.to_pylist()}")
        self._standing[name] = _Standing(footer["attempt"], tuple(footer["steps"]))
        self._check_steps(name, unit, table)

    def _is_poisoned(self, found: pa.Table, expected: pa.Table) -> bool:
        """Whether rows differ only where engines have often ended with them."""
        if found.num_rows != expected.num_rows:
            return False
        return all(
            row == right
            or (
                row["error_kind"] == "poison"
                and self.may_be_poison((row["row_id"], row["sample_index"]))
                and (row["row_id"], row["sample_index"], row["prompt"], row["output"])
                == (right["row_id"], right["sample_index"], right["prompt"], None)
            )
            for row, right in zip(found.to_pylist(), expected.to_pylist(), strict=True)
        )

    def _check_steps(self, name: str, unit: int, table: pa.Table) -> None:
        tokens: Counter[RowKey] = Counter()
        decoded: Counter[RowKey] = Counter()
        for steps in self._standing[name].steps:
            if steps not in self.contents:
                raise Violation(f"{name} names {steps}, which is not there")
            records = _read(self.contents[steps])
            columns = ("row_id", "sample_index", "num_committed", "method")
            for row, sample, committed, method in zip(
                *(records[column].to_pylist() for column in columns), strict=True
            ):
                tokens[row, sample] += committed
                decoded[row, sample] += method != "prefill"
        keys = list(
            zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
        )
        kinds = dict(zip(keys, table["error_kind"].to_pylist(), strict=True))
        expected = {
            key: number
            for key, number in self._expected.num_tokens[unit].items()
            if kinds[key] is None
        }
        if dict(tokens) != expected:
            raise Violation(f"the steps of {name} come to {tokens} tokens")
        counts = dict(zip(keys, table["num_steps"].to_pylist(), strict=True))
        if any(decoded[key] != number for key, number in counts.items()):
            raise Violation(f"the steps of {name} are {decoded}, its rows say {counts}")

    @property
    def orphans(self) -> set[str]:
        """Steps files that no data file names."""
        return set(self.names(STEPS)) - self.named_steps
