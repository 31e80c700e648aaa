"""The command `mobizo-agent`: options in, one red line and an exit status out. Knows no rule of training."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from device_agent.assignment import Ended, Outcome
from device_agent.client import DeviceClient
from device_agent.daemon import Daemon
from device_agent.datasets import check_directory
from device_agent.display import Display, configure_logs
from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.state import DeviceConfig, Home
from shared.errors import BadRequest, MobizoError
from shared.job import NAME
from shared.signing import key_id, parse_public, public_text

USAGE, FAILURE = 2, 1  # exit statuses

app = typer.Typer(
    name="mobizo-agent", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="state, cache and runs; else $MOBIZO_AGENT_HOME or the platform's place")
]
DataOption = Annotated[
    list[str], typer.Option("--data", metavar="NAME=DIR", help="a data set: train.jsonl, validation.jsonl, test.jsonl")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines for machines, on standard output")]


@app.command()
def enroll(
    server: Annotated[str, typer.Option(help="the server's URL")],
    token: Annotated[str, typer.Option(help="one-time token from `mobizo-server`'s operator")],
    name: Annotated[str, typer.Option(help="this device's name")],
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Join a server: trades the one-time token for this device's own and pins the server's public key."""
    place = Home.locate(home)
    place.create()
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"--name {name!r} must be lower-case letters, digits, '.', '_' or '-'")
    with DeviceClient(server, token) as client:
        grant = client.enrol(name, public_text(place.device_key().public_key()))
    pinned = key_id(parse_public(grant.server.public_key))
    place.enrol(
        DeviceConfig(
            server=server,
            name=name,
            device_id=grant.device_id,
            token=grant.token,
            public_key=grant.server.public_key,
            key_id=pinned,
        )
    )
    if json_lines:
        typer.echo(json.dumps({"device_id": grant.device_id, "server": server, "key_id": pinned}))
    else:
        typer.echo(f"enrolled as {name} ({grant.device_id}); programs must be signed by key {pinned}")


@app.command()
def run(
    data: DataOption,
    once: Annotated[bool, typer.Option("--once", help="exit after one job, or when none is waiting")] = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Lease jobs and train them until stopped (Ctrl-C or SIGTERM); a stopped run goes on at the next start."""
    _work(Home.locate(home), data, once, json_lines)


@app.command()
def train(
    data: DataOption,
    once: Annotated[bool, typer.Option("--once", help="required: train one job, then exit")] = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Train the job that is waiting for this device, then exit: status 1 if it failed."""
    if not once:
        raise BadRequest("`train` needs --once; `run` is the command that keeps training")
    _work(Home.locate(home), data, True, json_lines)


@app.command()
def status(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show what the agent of this home does."""
    place = Home.locate(home)
    config, shown = place.config(), place.status()
    running = place.running()
    state = shown.state if shown is not None and running else "stopped"
    if json_lines:
        facts = {"server": config.server, "name": config.name, "device_id": config.device_id}
        seen = shown.model_dump(mode="json") if shown is not None else {}
        typer.echo(json.dumps(facts | seen | {"running": running, "state": state}))
        return
    typer.echo(f"{config.name} ({config.device_id}) at {config.server}: {state}")
    if shown is None:
        return
    if running and shown.job_id is not None:
        line = shown.progress.line() if shown.progress is not None else "starting"
        typer.echo(f"job {shown.job_id} for adapter {shown.adapter}: {line}")
    if shown.last_job_id is not None:
        why = f": {shown.last_detail}" if shown.last_detail else ""
        typer.echo(f"last job {shown.last_job_id} {shown.last_outcome}{why}")


def parse_datasets(options: list[str]) -> dict[str, Path]:
    """The directory of each data set by name, from NAME=DIR. Raises BadRequest or InvalidDataset."""
    datasets: dict[str, Path] = {}
    for option in options:
        name, equals, directory = option.partition("=")
        if not equals or not re.fullmatch(NAME, name) or not directory:
            raise BadRequest(f"--data {option!r} must be NAME=DIR; NAME is lower-case letters, digits, '.', '_' or '-'")
        if name in datasets:
            raise BadRequest(f"--data names {name!r} twice")
        path = Path(directory).expanduser().resolve()
        check_directory(path)
        datasets[name] = path
    return datasets


def _work(home: Home, data: list[str], once: bool, json_lines: bool) -> None:
    datasets = parse_datasets(data)
    home.config()
    home.create()
    configure_logs(json_lines)
    live = sys.stderr.isatty() and not json_lines
    with home.lock(), Display(home, live) as display:
        daemon = Daemon(home, datasets, display)

        def stop(_number: int, _frame: FrameType | None) -> None:
            daemon.stop()

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        ended = daemon.run(once)
    _leave(ended)


def _leave(ended: Ended | None) -> None:
    if ended is None:
        typer.echo("no job is waiting for this device", err=True)
    elif ended.outcome not in (Outcome.COMPLETED, Outcome.INTERRUPTED):
        raise MobizoError(f"the job was {ended.outcome}" + (f": {ended.detail}" if ended.detail else ""))


def main() -> None:
    """Entry point: runs the command; a MobizoError becomes one line on standard error and an exit status."""
    try:
        app()
    except MobizoError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(error.detail, style="red", markup=False)
        usage = isinstance(error, (BadRequest, NotEnrolled, AlreadyRunning))
        raise SystemExit(USAGE if usage else FAILURE) from None
