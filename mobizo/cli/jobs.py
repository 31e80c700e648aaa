"""`mobizo job`: submission of jobs, their lists, views, progress and cancellation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, err, out, print_json, read_file, stop
from mobizo.cli.progress import show_job_progress
from mobizo.cli.tables import MAX_ROWS, Limit, print_table, take_newest
from mobizo.client import Client
from shared.job import JobRequest, JobState, JobView, Repeat

group = typer.Typer(help="Submit personalization jobs and follow them.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


@group.command()
@server_command
def submit(
    connect: Connect,
    file: Annotated[
        Path,
        typer.Argument(help="JSON file with the job, in the format of POST /v1/jobs.", exists=True, dir_okay=False),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Show the progress until the job ends.")] = False,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Repeat the job this long after each has ended, such as 12h or 7d."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a job."""
    request = read_file(file, JobRequest)
    if every is not None:
        try:
            request = request.model_copy(update={"repeat": Repeat(every=every)})
        except ValidationError as error:
            raise stop(f"--every {every!r} must be hours or days, such as 12h or 7d", 2) from error
    with connect() as client:
        _print_submitted(client, client.jobs.submit(request), watch, as_json)


def _print_submitted(client: Client, job: JobView, watch: bool, as_json: bool) -> None:
    """Prints a new job; with `watch`, waits for its end first. Ends the command with status 1 if the job failed."""
    if watch:
        job = show_job_progress(client, job.id, err)
    print_json(job) if as_json else out.print(f"{job.id}  {job.state}")
    if watch:
        _check_success(job)


def _check_success(job: JobView) -> None:
    """Ends the command with status 1 if the job failed or was cancelled."""
    if job.state is JobState.FAILED:
        reason = job.error.detail if job.error else "the job failed"
        raise stop(f"{reason}; `mobizo job retry {job.id}` submits it again", 1)
    if job.state is JobState.CANCELLED:
        raise stop(f"the job was cancelled; `mobizo job retry {job.id}` submits it again", 1)


@group.command()
@server_command
def view(connect: Connect, job_id: JobId, as_json: Json = False) -> None:
    """Show a job's state, and the reason if it waits or failed."""
    with connect("mobizo job list") as client:
        job = client.jobs.get(job_id)
        waiting = client.jobs.waiting_reason(job_id) if job.state is JobState.READY and not as_json else None
    if as_json:
        print_json(job)
        return
    lines = [f"{job.id}  {job.state}", *_recipe_changes(job)]
    if job.estimator_reason is not None:
        lines.append(job.estimator_reason)
    if job.progress is not None and not job.state.final:
        lines.append(job.progress.line())
    if waiting is not None:
        lines.append(waiting.why)
    if job.error is not None:
        lines.append(f"{job.error.code}: {job.error.detail}")
    if job.next_at is not None:
        lines.append(f"series {job.series}: the next job is created at {job.next_at:%Y-%m-%d %H:%M} UTC")
    elif job.series_end is not None:
        lines.append(f"series {job.series} has ended: {job.series_end}")
    if job.state_seconds:
        lines.append(f"seconds: {_time_line(job)}")
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _time_line(job: JobView) -> str:
    """Returns the seconds that the job spent in each state, and that the device spent in each phase of the run."""
    parts = [f"{state} {seconds:.1f}" for state, seconds in job.state_seconds.items()]
    if job.result is not None and job.result.phase_seconds:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in job.result.phase_seconds.items())
        parts.append(f"on the device: {phases}")
    return ", ".join(parts)


def _recipe_changes(job: JobView) -> list[str]:
    """Returns one line for each field of the recipe that differs from the request."""
    fields = ("estimator", "precision", "effective_batch", "micro_batch", "queries", "sequence_length")
    pairs = [(name, getattr(job.recipe, name), getattr(job.request.recipe, name)) for name in fields]
    return [
        f"{name} {value} (requested: {requested})"
        for name, value, requested in pairs
        # Without queries, the estimator's default is requested.
        if value != requested and not (name == "queries" and requested is None)
    ]


@group.command()
@server_command
def watch(connect: Connect, job_id: JobId, as_json: Json = False) -> None:
    """Show a job's progress until it ends. With --json, print one event per line."""
    with connect("mobizo job list") as client:
        if as_json:
            job = None
            for event in client.jobs.watch(job_id):
                typer.echo(event.model_dump_json())
                job = event if isinstance(event, JobView) else job
        else:
            job = show_job_progress(client, job_id, err)
            out.print(f"{job.id}  {job.state}")
    if job is not None:
        _check_success(job)


@group.command("list")
@server_command
def list_jobs(connect: Connect, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List jobs, newest first."""
    with connect() as client:
        jobs = take_newest(client.jobs.list(), limit)
    if as_json:
        print_json(list[BaseModel](jobs))
        return
    print_table(
        ("job", "state", "adapter", "user", "created"),
        [(job.id, job.state, job.adapter, job.user, job.created_at.isoformat(" ", "seconds")) for job in jobs],
        empty="no jobs; `mobizo job submit FILE` submits one",
    )


@group.command()
@server_command
def retry(
    connect: Connect,
    job_id: JobId,
    watch: Annotated[bool, typer.Option("--watch", help="Show the progress until the new job ends.")] = False,
    as_json: Json = False,
) -> None:
    """Submit the request of an ended job again, as a new job."""
    with connect("mobizo job list") as client:
        _print_submitted(client, client.jobs.retry(job_id), watch, as_json)


@group.command()
@server_command
def cancel(connect: Connect, job_id: JobId, as_json: Json = False) -> None:
    """Cancel a job. Of a job that repeats, this ends the series, also between two jobs."""
    with connect("mobizo job list") as client:
        job = client.jobs.cancel(job_id)
    print_json(job) if as_json else out.print(f"{job.id}  {job.state}")
