"""What a job would do, without doing it: its size, and its first prompts as the target sees them."""

from contextlib import closing
from itertools import islice

from bastion_batch.cluster.engines import EngineSource, PretrainedEngines
from bastion_batch.cluster.pool_preview import cluster_nodes_now, describe_pools
from bastion_batch.config import JobConfig
from bastion_batch.io.commit import committed_units
from bastion_batch.io.identity import job_identity, require_same_job
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan
from bastion_batch.io.planning import make_plan
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.io.reader import UnitReader
from bastion_batch.io.store import open_store
from bastion_batch.records import RowFault

NUM_PROMPTS = 3


def describe_plan(job: JobConfig, engines: EngineSource | None = None) -> str:
    """Check a job whose paths are absolute, and describe it. Writes nothing.

    Raises:
        InputError: as running it would.
    """
    engines = engines or PretrainedEngines()
    target = engines.check(job)
    plan = make_plan(job, target)
    lines = [
        *_size(job, plan),
        *_probe(engines.known_probe(job)),
        *_state(job, plan, target),
        *_workers(job),
        "",
    ]
    renderer = PromptRenderer(job.input, engines.load_tokenizer(target))
    with closing(UnitReader(plan)) as reader:
        rows = reader.read(0)
    for position, row_id in islice(enumerate(rows.row_ids), NUM_PROMPTS):
        prompt = rows.faults[position] or renderer.text(rows.row(position))
        lines += [_shown(prompt, row_id), ""]
    return "\n".join(lines).rstrip()


def _size(job: JobConfig, plan: Plan) -> list[str]:
    names = ", ".join(file.name for file in plan.inputs[:4])
    more = f" and {len(plan.inputs) - 4} more" if len(plan.inputs) > 4 else ""
    at_most = plan.num_outputs * job.decoding.max_new_tokens
    return [
        f"job       {job.name}",
        f"input     {plan.num_rows:,} rows in {_files(len(plan.inputs))}: {names}{more}",
        f"columns   {', '.join(f'{f.name}: {f.type}' for f in plan.input_schema)}",
        f"target    {job.model.target}, drafter {job.model.drafter}, {job.decoding.method}",
        f"outputs   {plan.num_outputs:,} in {plan.num_units:,} units, "
        f"at most {at_most:,} tokens; steps: {plan.steps}",
    ]


def _probe(known: str | None) -> list[str]:
    return [] if known is None else [f"probe     {known}"]


def _state(job: JobConfig, plan: Plan, target: object) -> list[str]:
    store = open_store(job.output)
    existing = load_plan(store)
    if existing is None:
        return [f"output    {store.root}: new"]
    identity = job_identity(job, target, plan.inputs)  # type: ignore[arg-type]
    require_same_job(existing, identity, output=store.root)
    num_done = len(committed_units(store))
    return [f"output    {store.root}: {num_done} of {existing.num_units} units committed"]


def _workers(job: JobConfig) -> list[str]:
    first, *others = describe_pools(job.workers, cluster_nodes_now())
    return [f"workers   {first}", *(f"          {line}" for line in others)]


def _shown(prompt: str | RowFault, row_id: str) -> str:
    if isinstance(prompt, RowFault):
        return f"--- {row_id}: an error row: {prompt.kind}: {prompt.message}"
    return f"--- {row_id}\n{prompt}"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"
