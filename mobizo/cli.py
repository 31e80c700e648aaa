"""The `mobizo` command: jobs and adapters from a terminal. Knows how to print; the client knows the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Column, Table

from mobizo.client import Client
from mobizo.job_file import parse_hours, read_request
from mobizo.live import show_live
from shared.access import Role, Scope, TokenRequest
from shared.errors import BadRequest, MobizoError
from shared.job import MOST_PRIORITY, JobState, JobView

app = typer.Typer(help="Submit personalization jobs, watch them, pull adapters.", no_args_is_help=True)
tokens = typer.Typer(help="Tokens of the tenant's people and services (operator).", no_args_is_help=True)
app.add_typer(tokens, name="tokens")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Server = Annotated[str, typer.Option(envvar="MOBIZO_SERVER", help="base URL of the server")]
Token = Annotated[str, typer.Option(envvar="MOBIZO_TOKEN", help="an app's or operator's token", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
DEFAULT_SERVER = "http://127.0.0.1:8000"


@contextmanager
def _client(server: str, token: str) -> Iterator[Client]:
    if not token:
        raise _stop("no token: give --token or set MOBIZO_TOKEN", 2)
    try:
        with Client(server, token) as client:
            yield client
    except MobizoError as error:
        raise _stop(error.detail, 1) from error


def _stop(message: str, status: int) -> typer.Exit:
    err.print(message, style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


def _whole(name: str) -> Column:
    """A column whose cells are never broken: they are copied into other commands."""
    return Column(name, no_wrap=True, overflow="ignore")


def _print_json(value: BaseModel | list[BaseModel] | dict[str, Any]) -> None:
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, list):
        plain = [item.model_dump(mode="json") for item in value]
    else:
        plain = value
    out.print_json(json.dumps(plain))


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
        request = read_request(file, rules, shrink, priority)
    except BadRequest as error:
        raise _stop(error.detail, 2) from error
    with _client(server, token) as client:
        job = client.submit(request)
        if watch:
            job = show_live(client, job.id, err)
        _print_json(job) if as_json else out.print(f"{job.id}  {job.state}")
        if job.state is JobState.FAILED and job.error:
            raise _stop(job.error.detail, 1)


@app.command(name="show")
def show_job(job_id: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show a job as it stands, and why it does not go on if it does not."""
    with _client(server, token) as client:
        job = client.job(job_id)
    if as_json:
        _print_json(job)
        return
    lines = [f"{job.id}  {job.state}", *_changed(job)]
    if job.progress is not None and not job.state.final:
        lines.append(job.progress.line())
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
    with _client(server, token) as client:
        if as_json:
            for event in client.watch(job_id):
                out.print(event.model_dump_json(), soft_wrap=True)
            return
        job = show_live(client, job_id, err)
        out.print(f"{job.id}  {job.state}")
        if job.error:
            raise _stop(job.error.detail, 1)


@app.command(name="jobs")
def list_jobs(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List jobs, newest first."""
    with _client(server, token) as client:
        jobs = list(client.jobs())
    if as_json:
        _print_json(list[BaseModel](jobs))
        return
    table = Table(_whole("job"), "state", _whole("adapter"), "user", "created")
    for job in jobs:
        created = job.created_at.isoformat(" ", "seconds")
        table.add_row(job.id, job.state, job.request.adapter, job.request.user, created)
    out.print(table)


@app.command()
def cancel(job_id: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Stop a job."""
    with _client(server, token) as client:
        job = client.cancel(job_id)
    _print_json(job) if as_json else out.print(f"{job.id}  {job.state}")


@app.command(name="adapters")
def list_adapters(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List adapters."""
    with _client(server, token) as client:
        adapters = list(client.adapters())
    if as_json:
        _print_json(list[BaseModel](adapters))
        return
    table = Table(_whole("adapter"), "versions", "user", "tuned accuracy", "latest")
    for adapter in adapters:
        tuned = adapter.latest.result.tuned_accuracy
        accuracy = "" if tuned is None else f"{tuned:.1%}"
        latest = adapter.latest.created_at.isoformat(" ", "seconds")
        table.add_row(adapter.name, str(adapter.versions), adapter.user, accuracy, latest)
    out.print(table)


@app.command()
def pull(
    name: str,
    to: Annotated[Path, typer.Option("--to", help="directory to write")],
    version: Annotated[int | None, typer.Option(help="a version; the latest by default")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Download an adapter as a PEFT directory."""
    with _client(server, token) as client:
        found = client.pull(name, to, version)
    _print_json(found) if as_json else out.print(f"{name} version {found.version} -> {to}")


@app.command()
def enrolment(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Make a one-time token for a device (operator)."""
    with _client(server, token) as client:
        made = client.enrolment()
    _print_json(made) if as_json else out.print(made.token)


@app.command()
def whoami(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show whose token this is, and what it may do."""
    with _client(server, token) as client:
        me = client.whoami()
    if as_json:
        _print_json(me)
        return
    owner = f"user {me.user}" if me.user else f"token {me.name or me.token_id}"
    out.print(f"{owner}, {me.role} of tenant {me.tenant}", markup=False)
    out.print(f"may: {' '.join(me.scopes) or 'nothing'}", markup=False)
    out.print(f"until: {_day(me.expires_at)}")


def _day(moment: datetime | None) -> str:
    return "it is revoked" if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="for you to tell tokens apart")] = "",
    role: Annotated[Role, typer.Option(help="operator or app")] = Role.APP,
    scope: Annotated[list[Scope] | None, typer.Option(help="what it may do; repeatable; default: the role's")] = None,
    user: Annotated[str | None, typer.Option(help="whose it is; default: as your own token")] = None,
    expires_in_days: Annotated[str | None, typer.Option(help="a number, or `never`; default: the server's")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make a token that may do no more than yours; it is shown this once."""
    days = int(expires_in_days) if expires_in_days and expires_in_days.isdecimal() else expires_in_days
    fields = {"name": name, "role": role, "scopes": scope or None, "user": user, "expires_in_days": days}
    try:
        request = TokenRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise _stop(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}", 2) from error
    with _client(server, token) as client:
        made = client.make_token(request)
    _print_json(made) if as_json else out.print(made.token, soft_wrap=True)


@tokens.command("list")
def list_tokens(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List tokens, newest first; what they are is not kept."""
    with _client(server, token) as client:
        found = list(client.tokens())
    if as_json:
        _print_json(list[BaseModel](found))
        return
    table = Table(_whole("id"), "name", "role", "user", "ends", "last used")
    for item in found:
        ends = "revoked" if item.revoked_at else "never" if item.expires_at is None else f"{item.expires_at:%Y-%m-%d}"
        used = "" if item.last_used_at is None else f"{item.last_used_at:%Y-%m-%d %H:%M}"
        table.add_row(item.id, item.name, item.role, item.user, ends, used)
    out.print(table)


@tokens.command("revoke")
def revoke_token(token_id: str, server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """End a token at once."""
    with _client(server, token) as client:
        client.revoke_token(token_id)
    out.print(f"{token_id} is revoked")


def main() -> None:
    """Entry point of the console script."""
    app()
