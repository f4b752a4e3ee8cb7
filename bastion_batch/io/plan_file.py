"""A plan on storage: read by every process of a job, never changed.

_bastion/units-<hash>.parquet   the units, content-addressed, written first
_bastion/plan.json              everything else, created once by put-if-absent
"""

import base64
import json
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bastion_batch.errors import OutputError
from bastion_batch.io.filesystems import without_credentials
from bastion_batch.io.parquet import read_parquet
from bastion_batch.io.plan import PLAN_FORMAT, Plan
from bastion_batch.io.sources import InputFile
from bastion_batch.io.store import (
    PLAN,
    PRIVATE,
    Output,
    Store,
    open_store,
)


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
