"""`mobizo enroll-token` and `mobizo devices`: enrollment of devices by an operator."""

from __future__ import annotations

from typing import Annotated

import typer

from mobizo.cli.console import DEFAULT_SERVER, Json, Server, Token, connected, err, out, print_json, stop
from shared.protocol import DeviceRequestView

commands = typer.Typer()
group = typer.Typer(help="Approve or deny devices that ask to enroll (operator).", no_args_is_help=True)
Code = Annotated[
    str, typer.Argument(metavar="CODE", help="Code that the device shows; letter case and dashes are ignored.")
]


@commands.command("enroll-token")
def create_enrollment_token(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Create a one-time token with which one device can enroll (operator)."""
    with connected(server, token) as client:
        created = client.devices.create_enrollment_token()
    print_json(created) if as_json else out.print(created.token)


@group.command()
def approve(
    code: Code,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Let a device enroll, after you have compared its name and key fingerprint with what the device shows."""
    with connected(server, token) as client:
        request = client.devices.get_request(code)
        if not yes:
            # Standard output is reserved for the result.
            for name, value in _facts(request):
                err.print(f"{name:12} {value}", markup=False, soft_wrap=True)
            if not typer.confirm("Does the device show the same values, and do you want to let it enroll?", err=True):
                raise stop("the device was not approved; `mobizo devices deny` rejects its request", 1)
        decided = client.devices.approve(code)
    print_json(decided) if as_json else out.print(f"{decided.name} is approved", markup=False)


@group.command()
def deny(code: Code, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Reject a device's request to enroll."""
    with connected(server, token) as client:
        decided = client.devices.deny(code)
    print_json(decided) if as_json else out.print(f"{decided.name} is denied", markup=False)


def _facts(request: DeviceRequestView) -> list[tuple[str, str]]:
    """Returns what an operator compares. Control characters, which the device may have sent, are replaced by `?`."""
    rows = [
        ("Name", request.name),
        ("Platform", request.platform),
        ("Fingerprint", request.fingerprint),
        ("Address", request.address),
    ]
    return [(name, "".join(letter if letter.isprintable() else "?" for letter in value)) for name, value in rows]
