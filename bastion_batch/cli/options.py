"""Arguments that several commands take."""

from typing import Annotated

import typer

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="The job file (YAML).")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."
    ),
]
Takeover = Annotated[
    bool,
    typer.Option("--takeover", help="Go on in place of a driver that may still run; it stops."),
]
Output = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT",
        help="An output's directory or URL, or the job file (YAML) that writes it: "
        "where storage options are needed, only the job file has them.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Of the cluster's dashboard, like http://127.0.0.1:8265; otherwise RAY_ADDRESS, or "
        "the cluster on this machine.",
    ),
]
