"""Commands that talk to a cluster through Ray Jobs."""

from typing import TYPE_CHECKING, Annotated

import typer

from bastion_batch.cli.options import Address, JobFile, Overrides
from bastion_batch.cli.terminal import command_name, say

if TYPE_CHECKING:
    from bastion_batch.cluster.ray_jobs import RayJobs


def submit(
    job: JobFile,
    overrides: Overrides = [],  # noqa: B006 - typer's way
    address: Address = None,
    working_dir: Annotated[
        str,
        typer.Option(
            help="Its copy is where the job runs; .gitignore and .rayignore are heeded, and what "
            "the job reads and writes is left out."
        ),
    ] = ".",
    excludes: Annotated[
        list[str],
        typer.Option("--exclude", metavar="PATTERN", help="Leave out of the copy; repeatable."),
    ] = [],  # noqa: B006 - typer's way
    variables: Annotated[
        list[str],
        typer.Option(
            "--env", metavar="NAME", help="Take this environment variable along; repeatable."
        ),
    ] = [],  # noqa: B006 - typer's way
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show the log and wait for the end.")
    ] = True,
    stop_wait: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long a stop lets the job end.", min=1)
    ] = 60,
    python: Annotated[str, typer.Option(help="The cluster's interpreter.")] = "python",
) -> None:
    """Run a job on a cluster, through Ray Jobs, and show its log. Exit code: the job's own.

    Local paths are made absolute first: the output is where you asked, on storage that the
    cluster shares with you. Ctrl-C stops the showing; the job goes on.
    """
    from bastion_batch.cluster.ray_jobs import RayJobs
    from bastion_batch.cluster.submission import make_submission

    submission = make_submission(
        job,
        overrides,
        working_dir=working_dir,
        excludes=excludes,
        variables=variables,
        stop_wait_seconds=stop_wait,
        python=python,
    )
    if submission.unset:
        say(f"the cluster must have {', '.join(submission.unset)}; --env NAME takes one along")
    jobs = RayJobs(address)
    job_id = jobs.submit(submission)
    typer.echo(f"job {job_id} at {jobs.address}, output {submission.output}")
    say(f"to stop it: {command_name()} stop --address {jobs.address} {job_id}")
    if wait:
        raise typer.Exit(_follow(jobs, job_id))


def stop(
    name: Annotated[
        str,
        typer.Argument(
            metavar="JOB_ID|OUTPUT", help="A submitted job's id, or its output or job file."
        ),
    ],
    address: Address = None,
    wait: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long to wait for its end.", min=1)
    ] = 90,
) -> None:
    """Stop a submitted job: it commits what is complete, keeps what is begun, and ends.

    The same `submit` goes on. Exit code 1: it has not ended in time.
    """
    from bastion_batch.cluster.ray_jobs import RayJobs
    from bastion_batch.outputs import find_output
    from bastion_batch.run_record import redacted

    jobs = RayJobs(address)
    all_ended = True
    for job_id in jobs.find(name, redacted(find_output(name).output.path)):
        ended = jobs.stop(job_id, patience_seconds=wait)
        all_ended = all_ended and ended is not None
        end = "has not ended yet" if ended is None else f"ended: {ended.status}"
        typer.echo(f"job {job_id} {end}")
    raise typer.Exit(0 if all_ended else 1)


def _follow(jobs: "RayJobs", job_id: str) -> int:
    """Show a job's log to its end, and return its exit code."""
    try:
        ended = jobs.follow(job_id, typer.echo)
    except KeyboardInterrupt:
        say(f"the job goes on; to stop it: {command_name()} stop {job_id}")
        return 130
    say(f"job {job_id} ended: {ended.status}, exit code {ended.exit_code}")
    if ended.exit_code == 1 and ended.message:
        say(ended.message.splitlines()[0])
    return ended.exit_code
