"""Commands that look after outputs. None needs a cluster; only `compact` writes, elsewhere."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from bastion_batch.cli.options import Output, Overrides
from bastion_batch.cli.terminal import say


def report(output: Output) -> None:
    """Show the end table of an output, recomputed from its files."""
    from bastion_batch.outputs import find_output
    from bastion_batch.report import load_result, table

    typer.echo(table(load_result(find_output(output).output)))


def status(
    output: Output,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show where a job stands, from its output alone: rows, failures, driver, workers, time left."""
    from bastion_batch.outputs import find_output, require_plan
    from bastion_batch.status import read_status, status_table

    named = find_output(output)
    found = read_status(named.output, require_plan(named), say=say)
    typer.echo(json.dumps(asdict(found), indent=1) if as_json else status_table(found))


def verify(
    output: Output,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read footers only, neither rows nor inputs.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006 - typer's way
) -> None:
    """Check an output against its plan and inputs; name each problem. Changes nothing.

    Every row and sample must be there once, in order, with the input's own columns and with steps
    that add up to its tokens. Exit code 0: complete and clean; 1: not complete, or with problems;
    2: not an output.
    """
    from bastion_batch.io.verify import described, verify
    from bastion_batch.outputs import find_output, require_plan
    from bastion_batch.run_record import read_record

    named = find_output(output, overrides)
    plan = require_plan(named)
    found = verify(named.output, plan, read_record(named.output), quick=quick)
    typer.echo(described(found))
    raise typer.Exit(0 if found.clean else 1)


def compact(
    output: Output,
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="A new or empty directory, or URL.")
    ],
    steps: Annotated[bool, typer.Option("--steps", help="Copy the step records too.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Copy what there is of a job that is not complete.")
    ] = False,
    file_mb: Annotated[
        int, typer.Option("--file-mb", help="Size of a file; memory holds one.", min=1)
    ] = 256,
) -> None:
    """Copy an output into few large files of rows in order. The output is left as it is."""
    from bastion_batch.io.compact import compact
    from bastion_batch.outputs import destination_of, find_output, require_plan

    named = find_output(output)
    target = destination_of(destination, named)
    done = compact(
        named.output,
        target,
        require_plan(named),
        steps=steps,
        partial=partial,
        file_bytes=file_mb * 2**20,
    )
    typer.echo(
        f"{done.num_rows:,} rows of {done.num_units:,} units in {len(done.files)} files, "
        f"{done.num_bytes / 2**20:,.1f} MB: {target.path}"
    )
