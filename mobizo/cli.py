"""The `mobizo` command: jobs and adapters from a terminal. Knows how to print; the client knows the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Column, Table

from mobizo.client import Client
from mobizo.live import show_live
from shared.errors import MobizoError
from shared.job import JobRequest, JobState

app = typer.Typer(help="Submit personalization jobs, watch them, pull adapters.", no_args_is_help=True)
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
    err.print(f"[red]{message}[/red]", soft_wrap=True)
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
    file: Annotated[Path, typer.Argument(help="JSON file with the job, as POST /v1/jobs takes it", exists=True)],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    watch: Annotated[bool, typer.Option(help="stay and show progress")] = False,
    as_json: Json = False,
) -> None:
    """Submit a job."""
    try:
        request = JobRequest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _stop(f"{file}: {where}: {first['msg']}", 2) from error
    with _client(server, token) as client:
        job = client.submit(request)
        if watch:
            job = show_live(client, job.id, err)
        _print_json(job) if as_json else out.print(f"{job.id}  {job.state}")
        if job.state is JobState.FAILED and job.error:
            raise _stop(job.error.detail, 1)


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


def main() -> None:
    """Entry point of the console script."""
    app()
