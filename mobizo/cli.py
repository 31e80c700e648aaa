"""The `mobizo` command: jobs and adapters from a terminal. Knows how to print; the client knows the API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.table import Table

from mobizo.access_cli import tokens, whoami
from mobizo.cohorts_cli import commands as cohorts
from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, err, out, print_json, stop, whole
from mobizo.decisions_cli import commands as decisions
from mobizo.job_file import parse_hours, parse_start, read_request
from mobizo.live import show_live
from mobizo.privacy_cli import privacy
from mobizo.registry_cli import commands as registry
from mobizo.scoring_cli import commands as scoring
from shared.errors import BadRequest
from shared.job import MOST_PRIORITY, JobState, JobView
from shared.protocol import DeviceRequestView

app = typer.Typer(help="Submit personalization jobs, watch them, pull adapters.", no_args_is_help=True)
app.add_typer(tokens, name="tokens")
app.add_typer(cohorts, name="cohort")
app.add_typer(privacy, name="privacy")
app.command()(whoami)
for group in (registry, decisions, scoring):
    app.registered_commands += group.registered_commands


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(help="JSON file with the job, as POST /v1/jobs takes it", exists=True, dir_okay=False)
    ],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    charging: Annotated[bool, typer.Option("--charging", help="train only on external power")] = False,
    battery_floor: Annotated[float | None, typer.Option(help="percent; under it only on external power")] = None,
    temperature_ceiling: Annotated[float | None, typer.Option(help="degrees Celsius of the hottest sensor")] = None,
    daily_minutes: Annotated[float | None, typer.Option(help="most training in a day")] = None,
    hours: Annotated[
        list[str] | None, typer.Option(help="a daily span of the device's time, such as 22:00-06:00; repeatable")
    ] = None,
    unmetered: Annotated[bool, typer.Option("--unmetered", help="no downloads and uploads at a price")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="take a smaller recipe where a device has too little memory")
    ] = False,
    priority: Annotated[
        int | None,
        typer.Option(min=-MOST_PRIORITY, max=MOST_PRIORITY, help="the higher goes first among the tenant's jobs"),
    ] = None,
    start: Annotated[str | None, typer.Option(help="go on from an adapter: NAME or NAME@REVISION")] = None,
    history: Annotated[
        str | None, typer.Option(help="ask for the run's trajectory: none, beside LoRA-B, or instead of it")
    ] = None,
    watch: Annotated[bool, typer.Option(help="stay and show progress")] = False,
    as_json: Json = False,
) -> None:
    """Submit a job. What is given here takes the place of the file's."""
    given = {
        "charging": charging or None,
        "battery_floor": battery_floor,
        "temperature_ceiling": temperature_ceiling,
        "daily_minutes": daily_minutes,
        "metered": False if unmetered else None,
    }
    try:
        rules: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if hours:
            rules["hours"] = [parse_hours(text) for text in hours]
        others = {
            "shrink": shrink or None,
            "priority": priority,
            "start": start and parse_start(start),
            "history": history,
        }
        request = read_request(file, rules, {name: value for name, value in others.items() if value is not None})
    except BadRequest as error:
        raise stop(error.detail, 2) from error
    with connected(server, token) as client:
        job = client.submit(request)
        if watch:
            job = show_live(client, job.id, err)
        print_json(job) if as_json else out.print(f"{job.id}  {job.state}")
        if job.state is JobState.FAILED and job.error:
            raise stop(job.error.detail, 1)


@app.command(name="show")
def show_job(job_id: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show a job as it stands, and why it does not go on if it does not."""
    with connected(server, token) as client:
        job = client.job(job_id)
        waiting = client.waiting(job_id) if job.state is JobState.READY and not as_json else None
    if as_json:
        print_json(job)
        return
    lines = [f"{job.id}  {job.state}", *_changed(job)]
    if job.progress is not None and not job.state.final:
        lines.append(job.progress.line())
    if waiting is not None:
        lines.append(waiting.why)
    if job.error is not None:
        lines.append(f"{job.error.code}: {job.error.detail}")
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _changed(job: JobView) -> list[str]:
    """What of the recipe is not as it was asked for."""
    asked = job.request.recipe
    return [
        f"{name} {getattr(job.recipe, name)} (asked for: {getattr(asked, name)})"
        for name in ("precision", "effective_batch", "queries", "sequence_length")
        if getattr(job.recipe, name) != getattr(asked, name)
    ]


@app.command(name="watch")
def watch_job(job_id: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show a job's progress until it ends."""
    with connected(server, token) as client:
        if as_json:
            for event in client.watch(job_id):
                out.print(event.model_dump_json(), soft_wrap=True)
            return
        job = show_live(client, job_id, err)
        out.print(f"{job.id}  {job.state}")
        if job.error:
            raise stop(job.error.detail, 1)


@app.command(name="jobs")
def list_jobs(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List jobs, newest first."""
    with connected(server, token) as client:
        jobs = list(client.jobs())
    if as_json:
        print_json(list[BaseModel](jobs))
        return
    table = Table(whole("job"), "state", whole("adapter"), "user", "created")
    for job in jobs:
        created = job.created_at.isoformat(" ", "seconds")
        table.add_row(job.id, job.state, job.request.adapter, job.request.user, created)
    out.print(table)


@app.command()
def cancel(job_id: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Stop a job."""
    with connected(server, token) as client:
        job = client.cancel(job_id)
    print_json(job) if as_json else out.print(f"{job.id}  {job.state}")


@app.command()
def enrolment(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Make a one-time token for a device (operator)."""
    with connected(server, token) as client:
        made = client.enrolment()
    print_json(made) if as_json else out.print(made.token)


devices_app = typer.Typer(help="Let devices in that ask to join (operator).", no_args_is_help=True)
app.add_typer(devices_app, name="devices")
Code = Annotated[str, typer.Argument(metavar="CODE", help="as the device shows it; case and dashes do not count")]


@devices_app.command()
def approve(
    code: Code,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Let the device in that shows a code, once its name and fingerprint are what it shows."""
    with connected(server, token) as client:
        seen = client.device_request(code)
        if not yes:
            # On standard error, which is free of what machines read.
            for name, value in _facts(seen):
                err.print(f"{name:12} {value}", markup=False, soft_wrap=True)
            if not typer.confirm("Does the device show the same, and may it join?", err=True):
                raise stop("the device was not let in; `mobizo devices deny` refuses it for good", 1)
        decided = client.decide(code, approved=True)
    print_json(decided) if as_json else out.print(f"{decided.name} may join", markup=False)


@devices_app.command()
def deny(code: Code, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Refuse the device that shows a code."""
    with connected(server, token) as client:
        decided = client.decide(code, approved=False)
    print_json(decided) if as_json else out.print(f"{decided.name} is refused", markup=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Simulate a cohort: many virtual devices on this machine make a shared adapter."""
    try:
        # It brings the compiler and the device's half along, which a client does without.
        from simulation.cli import main as run

        run(context.args)
    except ImportError as error:
        raise stop(
            f"{error.name} is not installed, which a simulation needs: pip install 'mobizo[simulate]'", 1
        ) from error


def _facts(seen: DeviceRequestView) -> list[tuple[str, str]]:
    """What an operator compares; whatever a device may say of itself is shown without control characters."""
    rows = [("Name", seen.name), ("Platform", seen.platform), ("Fingerprint", seen.fingerprint), ("From", seen.address)]
    return [(name, "".join(letter if letter.isprintable() else "?" for letter in value)) for name, value in rows]


def main() -> None:
    """Entry point of the console script."""
    app()
