"""`mobizo job`: submission of jobs, their lists, views, progress and cancellation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, err, out, print_json, read_file, show, stop
from mobizo.cli.progress import show_job_progress
from mobizo.cli.tables import MAX_ROWS, Limit, print_items, take_newest
from mobizo.client import Client
from shared.errors import Forbidden, NotFound
from shared.job import AUTO, JobRequest, JobStart, JobState, JobView, Repeat
from shared.registry import VersionState
from shared.result import Result

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
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            metavar="VERSION",
            help="Continue from a version, such as alice-movies@v2. With auto, the device chooses the best of several.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a job."""
    request = read_file(file, JobRequest)
    if start is not None:
        try:
            version = AUTO if start == AUTO else JobStart.model_validate(start)
        except ValidationError as error:
            raise stop(f"--start {start!r} must be auto or a version, such as alice-movies@v2", 2) from error
        request = request.model_copy(update={"start": version})
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
    print_json(job) if as_json else _print_end(client, job)
    if watch:
        _check_success(job)


def _print_end(client: Client, job: JobView) -> None:
    """Prints a job's state, and what came of it if it has succeeded."""
    out.print("\n".join((f"{job.id}  {job.state}", *_outcome(client, job))), markup=False, soft_wrap=True)


def _outcome(client: Client, job: JobView) -> list[str]:
    """Returns the scores of a job that has succeeded, and whether its version is approved or held and why."""
    if job.state is not JobState.SUCCEEDED or job.result is None:
        return []
    lines = [_score_line(job.result)]
    if job.result.reference_loss_change is not None:
        lines.append(f"loss of the reference texts {job.result.reference_loss_change:+.1%}")
    if job.adapter_version is not None:
        name = f"{job.request.adapter}@v{job.adapter_version}"
        try:
            version = client.adapters.version(job.request.adapter, job.adapter_version)
        except (Forbidden, NotFound):  # a token without adapters:read, or a version that was deleted
            return lines
        lines.append(f"{name} is {version.state}{': ' if version.message else ''}{version.message}")
        if version.state is VersionState.HELD:
            lines.append(f"`mobizo adapter approve {name}` approves it, `mobizo adapter delete {name}` deletes it")
    return lines


def _score_line(result: Result) -> str:
    """Returns the score of a run beside the scores that it is compared with."""
    split = result.accuracy_split or "test"
    if result.perplexities is not None:
        before, after = result.perplexities
        return f"{split} perplexity {after:.2f}, before training {before:.2f}"
    if result.tuned_accuracy is None:
        return "the device reported no score"
    others = {
        "before training": result.before_accuracy,
        "always the most frequent answer": result.majority_accuracy,
        "n-grams": result.baseline_accuracy,
    }
    compared = [f"{name} {accuracy:.1%}" for name, accuracy in others.items() if accuracy is not None]
    note = f" ({result.small_split_note})" if result.small_split_note else ""
    return ", ".join((f"{split} accuracy {result.tuned_accuracy:.1%}", *compared)) + note


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
    """Show a job's state and score, why it waits or failed, and what an operator can do about it."""
    with connect("mobizo job list") as client:
        job = client.jobs.get(job_id)
        is_waiting = job.state in (JobState.QUEUED, JobState.READY)
        waiting = client.jobs.waiting_reason(job_id) if is_waiting and not as_json else None
        outcome = [] if as_json else _outcome(client, job)
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
    lines += outcome
    if job.error is not None:
        lines.append(f"{job.error.code}: {job.error.detail}")
        if job.round is None:  # a round submits its own jobs
            lines.append(f"`mobizo job retry {job.id}` submits it again")
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
            _print_end(client, job)
    if job is not None:
        _check_success(job)


@group.command("list")
@server_command
def list_jobs(connect: Connect, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List jobs, newest first."""
    with connect() as client:
        jobs = take_newest(client.jobs.list(), limit)
    print_items(
        as_json,
        jobs,
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
    """Cancel a job. For a job that repeats, this ends the series, even between two jobs."""
    with connect("mobizo job list") as client:
        job = client.jobs.cancel(job_id)
    show(as_json, job, f"{job.id}  {job.state}")
