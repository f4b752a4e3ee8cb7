"""Making a job's plan, or finding the one that stands in its output.

A job whose identity differs from the plan's is refused. Where the input files lie and how much is
recorded of the steps is as each invocation says.
"""

import dataclasses
import json
import logging
import secrets
from collections.abc import Sequence
from hashlib import blake2b

from bastion_batch.config import JobConfig
from bastion_batch.errors import DataError
from bastion_batch.io.filesystems import without_credentials
from bastion_batch.io.identity import TargetFiles, differences, job_identity, require_same_job
from bastion_batch.io.plan import Plan
from bastion_batch.io.plan_file import load_plan, save_plan
from bastion_batch.io.prompts import require_prompt_column
from bastion_batch.io.scan import scan
from bastion_batch.io.schemas import STEPS_SCHEMA, carried_columns, data_schema
from bastion_batch.io.sources import InputFile, find_inputs, find_paths, name_of
from bastion_batch.io.store import (
    Output,
    Store,
    open_store,
    prepare_output,
    probe_conditional,
)
from bastion_batch.io.units import cut_units, rows_per_unit

logger = logging.getLogger(__name__)
STEPS_ALL_ROWS = 100_000
"""Up to so many output rows ``output.steps: auto`` records the steps of all."""


def make_plan(job: JobConfig, target: TargetFiles) -> Plan:
    """Read the inputs once and plan the job; writes nothing.

    Raises:
        DataError: naming the file or column that is missing, empty or refused.
    """
    return _planned(job, target, find_inputs(job.input.paths, job.input.storage_options))


def _planned(job: JobConfig, target: TargetFiles, files: tuple[InputFile, ...]) -> Plan:
    found = scan(files, job.input.prompt, job.input.storage_options)
    require_prompt_column(found.schema, job.input)
    samples = job.decoding.samples_per_row
    mixed = job.model.allow_mixed_dtype
    num_outputs = found.num_rows * samples
    return Plan(
        job_id=secrets.token_hex(4),
        identity=job_identity(job, target, files),
        inputs=files,
        units=cut_units(found.spans, rows_per_unit(job.output.unit_rows, num_outputs, samples)),
        num_rows=found.num_rows,
        samples_per_row=samples,
        steps=resolve_steps(job.output.steps, num_outputs),
        carried=tuple(
            c.source for c in carried_columns(found.schema, job.output, mixed_dtype=mixed)
        ),
        input_schema=found.schema,
        data_schema=data_schema(found.schema, job.output, mixed_dtype=mixed),
        steps_schema=STEPS_SCHEMA,
        storage_options=job.input.storage_options,
    )


def open_plan(job: JobConfig, target: TargetFiles, output: Output | None = None) -> Plan:
    """The plan of the job's output: the one that stands there, or a new one, saved.

    `output` is where the job's output is found, if not where the job says.

    Raises:
        DataError: as `make_plan`.
        OutputError: the output cannot be written, or holds a different job.
    """
    store = open_store(job.output if output is None else output)
    files = find_inputs(job.input.paths, job.input.storage_options)
    existing = load_plan(store)
    if existing is None:
        plan = _planned(job, target, files)
        prepare_output(store)
        existing = save_plan(store, plan if _probed(store) else _overwritable(plan, store))
    require_same_job(existing, job_identity(job, target, files), output=store.root)
    return _as_invoked(existing, job, [file.path for file in files])


def _overwritable(plan: Plan, store: Store) -> Plan:
    """The plan for an output where the last writer of a name wins.

    Its job id is no matter of chance there: of drivers that plan at the same time, each writes the
    plan that the others have begun to follow.
    """
    text = json.dumps([plan.identity, store.root], sort_keys=True)
    job_id = blake2b(text.encode(), digest_size=4).hexdigest()
    return dataclasses.replace(plan, conditional_put=False, job_id=job_id)


def _probed(store: Store) -> bool:
    """Whether creating a name is atomic in the output; says so where it is not."""
    conditional = probe_conditional(store)
    if not conditional:
        logger.warning(
            "output %s cannot create a file only if it is absent: of two writers of a unit the "
            "last one counts, and steps/ may keep files that no unit names",
            store.root,
        )
    return conditional


def with_operational(plan: Plan, job: JobConfig) -> Plan:
    """The plan with what this invocation says of where the inputs lie and which steps count.

    Raises:
        DataError: the paths name other files than the planned ones.
    """
    paths = find_paths(job.input.paths, job.input.storage_options)
    planned, found = ([name_of(f) for f in fs] for fs in ([f.path for f in plan.inputs], paths))
    if found != planned:
        only = differences(planned, found)
        raise DataError(
            f"input {', '.join(map(without_credentials, job.input.paths))} names other files than"
            f" planned: {only.planned} -> {only.now}"
        )
    return _as_invoked(plan, job, paths)


def _as_invoked(plan: Plan, job: JobConfig, paths: Sequence[str]) -> Plan:
    """The plan with the inputs at these paths, and this invocation's other choices."""
    return dataclasses.replace(
        plan,
        inputs=tuple(f._replace(path=p) for f, p in zip(plan.inputs, paths, strict=True)),
        steps=resolve_steps(job.output.steps, plan.num_outputs),
        storage_options=job.input.storage_options,
    )


def resolve_steps(steps: str, num_outputs: int) -> str:
    """What ``output.steps`` means for a job of this size."""
    if steps != "auto":
        return steps
    return "all" if num_outputs <= STEPS_ALL_ROWS else "sample:0.01"
