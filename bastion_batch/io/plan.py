"""The plan: the immutable description of a job, made once and frozen in the output.

    _bastion/units-<hash>.parquet   the units, content-addressed, written first
    _bastion/plan.json              everything else, created once by put-if-absent

Identity decides what the output is: a job whose identity differs from the plan's is refused.
Where the input files lie and how much is recorded of the steps may change between invocations.
"""

import base64
import dataclasses
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.config import JobConfig
from bastion_batch.core.noise import NOISE_VERSION
from bastion_batch.errors import DataError, OutputError
from bastion_batch.io.filesystems import without_credentials
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.prompts import PROMPT_VERSION, require_prompt_column
from bastion_batch.io.scan import scan
from bastion_batch.io.schemas import (
    SCHEMA_VERSION,
    STEPS_SCHEMA,
    carried_columns,
    data_schema,
)
from bastion_batch.io.sources import InputFile, find_inputs, find_paths, name_of
from bastion_batch.io.store import (
    PLAN,
    PRIVATE,
    Output,
    Store,
    open_store,
    prepare_output,
    probe_conditional,
)
from bastion_batch.io.units import Unit, cut_units, rows_per_unit

logger = logging.getLogger(__name__)

PLAN_FORMAT = 2

_MEANT_BY_OLDER = {"model.allow_mixed_dtype": False}
"""What a plan means that was made before there was this field."""

STEPS_ALL_ROWS = 100_000
"""Up to so many output rows ``output.steps: auto`` records the steps of all."""


class TargetFiles(Protocol):
    """What identity needs to know of a target."""

    @property
    def digest(self) -> str:
        """Identifies weights, tokenizer and chat template."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A job as it was planned. Small: units are columns, rows are not in it."""

    job_id: str
    """Short and random; every committed file carries it."""
    identity: dict[str, Any]
    inputs: tuple[InputFile, ...]
    units: pa.Table
    num_rows: int
    samples_per_row: int
    steps: str
    """``all``, ``sample:FRACTION`` or ``off``."""
    carried: tuple[str, ...]
    """Input columns that `data/` keeps: its first ones, in this order."""
    input_schema: pa.Schema
    data_schema: pa.Schema
    steps_schema: pa.Schema
    conditional_put: bool = True
    """Whether creating a name is atomic in the output; otherwise the last writer of one wins."""
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """For the inputs' file system, as this invocation says; never saved."""
    plan_format: int = PLAN_FORMAT

    @property
    def num_units(self) -> int:
        """Files that the finished `data/` holds."""
        return self.units.num_rows

    @property
    def num_outputs(self) -> int:
        """Rows that the finished `data/` holds."""
        return self.num_rows * self.samples_per_row

    @property
    def prompt_column(self) -> str | None:
        """The column of text prompts, if the job has one."""
        return self.identity["input.prompt"]

    def unit(self, unit: int) -> Unit:
        """One unit."""
        return Unit(unit, *(column[unit].as_py() for column in self.units.columns))


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
        only = _differences(planned, found)
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


def job_identity(job: JobConfig, target: TargetFiles, files: Sequence[InputFile]) -> dict[str, Any]:
    """Everything that decides what the output is, as JSON values."""
    identity = {
        **job.identity_fields(),
        "input.files": [file.identity for file in files],
        "target_digest": target.digest,
        "noise_version": NOISE_VERSION,
        "prompt_version": PROMPT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "plan_format": PLAN_FORMAT,
    }
    return json.loads(json.dumps(identity))


def require_same_job(
    existing: Plan, identity: Mapping[str, Any], *, output: str = "the output"
) -> None:
    """Check that a job is the one that was planned.

    Raises:
        OutputError: listing every identity field that differs, with both values.
    """
    planned = _MEANT_BY_OLDER | existing.identity
    names = sorted({*planned, *identity})
    pairs = {name: (planned.get(name), identity.get(name)) for name in names}
    lines = [
        f"  {name}: {shown.planned} -> {shown.now}"
        for name, (old, new) in pairs.items()
        if old != new
        for shown in [_differences(old, new)]
    ]
    if lines:
        raise OutputError(
            f"{output} holds a different job; give another output.path, or restore what differs"
            " (planned -> now):\n" + "\n".join(lines)
        )


class _Differences(NamedTuple):
    """Two values as they are shown beside each other."""

    planned: str
    now: str


def _differences(planned: Any, now: Any) -> _Differences:  # noqa: ANN401 - any JSON values
    """Both values; of two lists only the items that the other one does not have."""
    if _are_names(planned) and _are_names(now) and set(planned) != set(now):
        gone, added = set(planned) - set(now), set(now) - set(planned)
        planned = [item for item in planned if item in gone]
        now = [item for item in now if item in added]
    return _Differences(_show(planned), _show(now))


def _are_names(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _show(value: Any) -> str:  # noqa: ANN401 - any JSON value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}..."


def resolve_steps(steps: str, num_outputs: int) -> str:
    """What ``output.steps`` means for a job of this size."""
    if steps != "auto":
        return steps
    return "all" if num_outputs <= STEPS_ALL_ROWS else "sample:0.01"


def save_plan(output: Output, plan: Plan) -> Plan:
    """Freeze the plan in an output and return the plan that stands.

    When another driver was first, its plan stands: check it with `require_same_job`.

    Raises:
        OutputError: the plan cannot be written.
    """
    store = open_store(output)
    try:
        store.put_if_absent(_units_name(plan.units), _units_payload(plan.units))
        if store.put_if_absent(PLAN, _header(plan)):
            return plan
    except OSError as error:
        raise OutputError(f"plan of {store.root} cannot be written: {error.strerror}") from error
    standing = load_plan(store)
    assert standing is not None, "a plan is never removed"
    return standing


def load_plan(output: Output) -> Plan | None:
    """The plan of an output, or None where there is none.

    Raises:
        OutputError: the plan is damaged, or of a format this version does not read.
        OSError: storage failed, which says nothing about the plan.
    """
    store = open_store(output)
    try:
        if not store.exists(PLAN):
            return None
        return _from_header(store, json.loads(store.read(PLAN)))
    except (KeyError, TypeError, ValueError, FileNotFoundError, pa.ArrowException) as error:
        raise OutputError(f"plan of {store.root} cannot be read: {error!r}") from error


def _header(plan: Plan) -> bytes:
    schemas = {
        "input": plan.input_schema,
        "data": plan.data_schema,
        "steps": plan.steps_schema,
    }
    header = {
        "plan_format": plan.plan_format,
        "job_id": plan.job_id,
        "identity": plan.identity,
        "inputs": [
            file._replace(path=without_credentials(file.path))._asdict() for file in plan.inputs
        ],
        "units_file": _units_name(plan.units),
        "num_units": plan.num_units,
        "num_rows": plan.num_rows,
        "samples_per_row": plan.samples_per_row,
        "steps": plan.steps,
        "conditional_put": plan.conditional_put,
        "carried": plan.carried,
        "columns": {k: [f"{f.name}: {f.type}" for f in s] for k, s in schemas.items()},
        "schemas": {
            k: base64.b64encode(s.serialize().to_pybytes()).decode() for k, s in schemas.items()
        },
    }
    return json.dumps(header, indent=1).encode()


def _from_header(store: Store, header: dict[str, Any]) -> Plan:
    if header["plan_format"] != PLAN_FORMAT:
        raise OutputError(
            f"plan of {store.root} has format {header['plan_format']};"
            f" this version reads {PLAN_FORMAT}"
        )
    with store.open(header["units_file"]) as file:
        units = read_parquet(file)
    if _units_name(units) != header["units_file"]:
        raise OutputError(f"{store.root}/{header['units_file']} is not what the plan names")
    schemas = {
        k: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(v)))
        for k, v in header["schemas"].items()
    }
    return Plan(
        job_id=header["job_id"],
        identity=header["identity"],
        inputs=tuple(InputFile(**file) for file in header["inputs"]),
        units=units,
        num_rows=header["num_rows"],
        samples_per_row=header["samples_per_row"],
        steps=header["steps"],
        conditional_put=header["conditional_put"],
        carried=tuple(header["carried"]),
        input_schema=schemas["input"],
        data_schema=schemas["data"],
        steps_schema=schemas["steps"],
    )


def _units_name(units: pa.Table) -> str:
    digest = blake2b(digest_size=8)
    for column in units.columns:
        digest.update(column.to_numpy())
    return f"{PRIVATE}/units-{digest.hexdigest()}.parquet"


def _units_payload(units: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(units, sink)
    return memoryview(sink.getvalue())
