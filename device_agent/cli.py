"""The command `mobizo-agent`: options in, one red line and an exit status out. Knows no rule of training."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer
from rich.console import Console

from device_agent import adapter_cli, machine_cli, run_cli
from device_agent.client import DeviceClient
from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.options import HomeOption, JsonOption
from device_agent.state import DeviceConfig, Home
from shared.errors import BadRequest, MobizoError
from shared.job import NAME
from shared.signing import key_id, parse_public, public_text

USAGE, FAILURE = 2, 1  # exit statuses

app = typer.Typer(
    name="mobizo-agent",
    help="Trains personal adapters on this device for a server, and uses them here, offline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


app.add_typer(run_cli.app)
app.add_typer(machine_cli.app)
app.add_typer(adapter_cli.app)


def spell_out(arguments: list[str]) -> list[str]:
    """Command-line words in which `--adb` without a serial says so: the option may stand alone."""
    words = []
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        words.append("--adb=" if word == "--adb" and following.startswith("-") else word)
    return words


def main() -> None:
    """Entry point: runs the command; a MobizoError becomes one line on standard error and an exit status."""
    try:
        app(spell_out(sys.argv[1:]))
    except MobizoError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(error.detail, style="red", markup=False)
        usage = isinstance(error, (BadRequest, NotEnrolled, AlreadyRunning))
        raise SystemExit(USAGE if usage else FAILURE) from None
