"""The plan: the immutable description of a job, made once and frozen in the output."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from bastion_batch.io.sources import InputFile
from bastion_batch.io.units import Unit

PLAN_FORMAT = 2


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
