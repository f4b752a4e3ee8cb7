"""The end of a job: its result, recomputed from storage, and the table that shows it."""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from bastion_batch.errors import OutputError
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.results import Totals, read_totals
from bastion_batch.io.store import DATA, PLAN, Output, open_store
from bastion_batch.records import EngineTotals, measured_speedup
from bastion_batch.run_record import PoolTotals, all_pools, engine_counts, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job's output holds, and what making it took. Counts samples as outputs of their own.

    Times and rates cover every recorded invocation; they are None when none has decoded.
    """

    name: str
    output: str
    complete: bool
    num_rows: int
    """Input rows."""
    num_outputs: int
    """Committed rows of `data/`."""
    num_outputs_planned: int
    num_failed: int
    error_kinds: dict[str, int]
    """Failed outputs by kind."""
    num_prompt_tokens: int
    num_output_tokens: int
    wall_seconds: float
    tokens_per_second: float | None
    tokens_per_step: float | None
    """Tokens per decode step of a row."""
    mean_nodes: float | None
    """Drafted nodes per decode step of a row."""
    speedup: float | None
    """Over plain decoding on the same devices, measured during the job."""
    pools: tuple[PoolTotals, ...] = ()
    """What each pool of workers held, cost and made."""

    @property
    def cost(self) -> float | None:
        """Dollars, of the pools that have a price; None if none has."""
        costs = [pool.cost for pool in self.pools if pool.cost is not None]
        return sum(costs) if costs else None

    @property
    def tokens_per_dollar(self) -> float | None:
        """Output tokens of committed rows for each dollar; None where nothing was paid."""
        return self.num_output_tokens / self.cost if self.cost else None

    @property
    def data(self) -> str:
        """The directory of the answers."""
        return f"{self.output}/{DATA}"


def load_result(output: Output) -> JobResult:
    """The result of an output so far.

    Raises:
        OutputError: there is no job in this directory.
    """
    store = open_store(output)
    plan = load_plan(store)
    if plan is None:
        raise OutputError(f"{store.root} holds no job: it has no {PLAN}")
    return result_of(store, plan, read_totals(store, plan))


def result_of(output: Output, plan: Plan, totals: Totals) -> JobResult:
    """Join what the files hold with what the engines recorded."""
    store = open_store(output)
    record: dict[str, Any] = read_record(store) or {"name": "job", "invocations": []}
    engines = engine_counts(record["invocations"])
    counts = EngineTotals()
    for engine in engines:
        counts = counts.plus(engine)
    decoding_seconds = sum(i["decoding_seconds"] for i in record["invocations"])
    return JobResult(
        name=record["name"],
        output=store.root,
        complete=totals.num_units == plan.num_units,
        num_rows=plan.num_rows,
        num_outputs=totals.num_outputs,
        num_outputs_planned=plan.num_outputs,
        num_failed=totals.num_failed,
        error_kinds=totals.error_kinds,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_output_tokens=totals.num_output_tokens,
        wall_seconds=sum(i["wall_seconds"] for i in record["invocations"]),
        tokens_per_second=counts.num_committed / decoding_seconds if decoding_seconds else None,
        tokens_per_step=counts.tokens_per_step,
        mean_nodes=counts.mean_nodes,
        speedup=measured_speedup(engines),
        pools=tuple(all_pools(record["invocations"])),
    )


def table(result: JobResult) -> str:
    """The end table: aligned lines, nothing that needs a terminal."""
    lines = [
        ("rows", _rows(result)),
        ("failed rows", _failed(result)),
        ("output tokens", f"{result.num_output_tokens:,}"),
        ("wall time", duration(result.wall_seconds)),
        ("tokens/s", _number(result.tokens_per_second, ".1f")),
        ("tokens per step", _number(result.tokens_per_step, ".2f")),
        ("mean nodes", _number(result.mean_nodes, ".1f")),
        ("speedup", _speedup(result.speedup)),
        *_costs(result),
        ("output", result.data),
        ("read it", read_command(result.data)),
    ]
    return "\n".join(f"{label:<17}{value}" for label, value in lines)


def read_command(data: str) -> str:
    """One line for a shell that shows the answers."""
    program = f"import pyarrow.dataset as d; print(d.dataset({data!r}).to_table())"
    plain = re.fullmatch(r"[\w./-]+", data)
    return f'python -c "{program}"' if plain else f"python -c {shlex.quote(program)}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as far as they matter."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def _rows(result: JobResult) -> str:
    samples = result.num_outputs_planned // result.num_rows
    outputs = f" x {samples} samples" if samples > 1 else ""
    if result.complete:
        return f"{result.num_rows:,}{outputs}"
    return f"{result.num_outputs:,} of {result.num_outputs_planned:,}: not complete"


def _costs(result: JobResult) -> list[tuple[str, str]]:
    """A line for the money, and one for each pool if there are several."""
    lines = []
    if result.cost is not None:
        per_dollar = _number(result.tokens_per_dollar, ",.0f")
        lines.append(("cost", f"${result.cost:,.2f}; {per_dollar} tokens per dollar"))
    if len(result.pools) > 1:
        lines += [(f"  {pool.pool}", _pool(pool)) for pool in result.pools]
    return lines


def _pool(pool: PoolTotals) -> str:
    held = f"{pool.num_workers} workers, {pool.held_hours:.2f} h, {pool.num_tokens:,} tokens"
    if pool.cost is None:
        return held
    return f"{held}, ${pool.cost:,.2f}; {_number(pool.tokens_per_dollar, ',.0f')} tokens per dollar"


def _failed(result: JobResult) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.error_kinds.items()))
    return f"{result.num_failed:,}" + (f" ({kinds})" if kinds else "")


def _speedup(speedup: float | None) -> str:
    if speedup is None:
        return "not measured"
    return f"{speedup:.2f}x over plain decoding, measured in this job"


def _number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)
