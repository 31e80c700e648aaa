"""The command `mobizo-agent`: options in, one red line and an exit status out. Knows no rule of training."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer
from rich.console import Console

from device_agent import adapter_cli, machine_cli, run_cli, shelf_cli
from device_agent.client import DeviceClient
from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.joining import join
from device_agent.options import HomeOption, JsonOption
from device_agent.state import DeviceConfig, Home
from shared.errors import BadRequest, MobizoError
from shared.job import NAME
from shared.protocol import DeviceAuthorization, DeviceGrant
from shared.signing import fingerprint, key_id, new_private_key, parse_public, public_text
from shared.transport import Transport

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
    name: Annotated[str, typer.Option(help="this device's name")],
    token: Annotated[
        str | None, typer.Option(help="one-time token from the operator; else a code is shown, which one approves")
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Join a server, by a one-time token or a code that an operator approves, and pin the server's public key."""
    place = Home.locate(home)
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"--name {name!r} must be lower-case letters, digits, '.', '_' or '-'")
    place.create()
    if token is not None:
        with DeviceClient(server, token) as client:
            grant = client.enrol(name, public_text(place.device_key().public_key()))
    else:
        grant = _ask_to_join(place, server, name, json_lines)
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


def _ask_to_join(place: Home, server: str, name: str, json_lines: bool) -> DeviceGrant:
    """Shows a code and waits for an operator. Leaves nothing behind unless one approves, also when interrupted."""
    key = place.kept_key() or new_private_key()
    public = public_text(key.public_key())

    def show(asked: DeviceAuthorization) -> None:
        facts = {"user_code": asked.user_code, "verification_uri": asked.verification_uri}
        if json_lines:
            typer.echo(json.dumps(facts | {"fingerprint": fingerprint(public), "expires_in": asked.expires_in}))
            return
        typer.echo(f"Code:        {asked.user_code}")
        typer.echo(f"Fingerprint: {fingerprint(public)}")
        typer.echo(f"Ask an operator to run: mobizo devices approve {asked.user_code} --server {server}")
        typer.echo(f"(or to look at {asked.verification_uri_complete or asked.verification_uri})")
        typer.echo(f"Waiting for at most {asked.expires_in // 60} minutes; Ctrl-C ends it.")

    try:
        with Transport(server) as transport:
            grant = join(transport, name, public, show)
    except BaseException:
        place.remove_empty()
        raise
    place.keep_key(key)
    return grant


app.add_typer(run_cli.app)
app.add_typer(machine_cli.app)
app.add_typer(adapter_cli.app)
app.add_typer(shelf_cli.app, name="adapters")


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
