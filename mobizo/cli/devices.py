"""`mobizo device`: enrollment of devices by an operator."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.console import (
    DEFAULT_SERVER,
    Json,
    Server,
    Token,
    Yes,
    connected,
    err,
    invalid_field,
    out,
    print_json,
    stop,
)
from shared.protocol import DeviceApproval, DeviceRequestView, EnrollmentRequest

group = typer.Typer(
    help="Approve devices that ask to enroll, and bind users to devices (operator).", no_args_is_help=True
)
Code = Annotated[
    str, typer.Argument(metavar="CODE", help="Code that the device shows; letter case and dashes are ignored.")
]

Users = Annotated[
    list[str] | None,
    typer.Option("--user", help="User whose data is on the device; repeatable. It gets jobs of these users only."),
]
Device = Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device, such as device_4f1c.")]
User = Annotated[str, typer.Argument(help="Name of the user, as jobs name it.")]
NO_USERS = "No user was given: the device gets no job until `mobizo device bind DEVICE USER` names one."


@group.command("enroll-token")
def create_enrollment_token(
    user: Users = None, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False
) -> None:
    """Create a one-time token with which one device can enroll (operator)."""
    try:
        request = EnrollmentRequest(users=user or [])
    except ValidationError as error:
        raise stop(invalid_field(error), 2) from error
    with connected(server, token) as client:
        created = client.devices.create_enrollment_token(request)
    if not user:
        # Standard output is reserved for the token.
        err.print(NO_USERS, markup=False, soft_wrap=True)
    print_json(created) if as_json else out.print(created.token)


@group.command()
def approve(
    code: Code,
    user: Users = None,
    yes: Yes = False,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Let a device enroll, after you have compared its name and key fingerprint with what the device shows."""
    try:
        users = DeviceApproval(users=user or []).users
    except ValidationError as error:
        raise stop(invalid_field(error), 2) from error
    with connected(server, token) as client:
        request = client.devices.get_request(code)
        if not yes:
            # Standard output is reserved for the result.
            for name, value in _facts(request):
                err.print(f"{name:12} {value}", markup=False, soft_wrap=True)
            if not typer.confirm("Does the device show the same values, and do you want to let it enroll?", err=True):
                raise stop("the device was not approved; `mobizo device reject` rejects its request", 1)
        decided = client.devices.approve(code, users)
    if not users:
        err.print(NO_USERS, markup=False, soft_wrap=True)
    print_json(decided) if as_json else out.print(f"{decided.name} is approved", markup=False)


@group.command()
def reject(code: Code, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Reject a device's request to enroll."""
    with connected(server, token) as client:
        decided = client.devices.deny(code)
    print_json(decided) if as_json else out.print(f"{decided.name} is rejected", markup=False)


@group.command()
def bind(device: Device, user: User, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Bind a user to a device: from now on the device gets the user's jobs (operator)."""
    with connected(server, token) as client:
        found = client.devices.bind(device, user)
    print_json(found) if as_json else out.print(f"{found.name}: {', '.join(found.users)}", markup=False)


@group.command()
def unbind(device: Device, user: User, server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """Unbind a user from a device. The user's jobs on it return to the queue for other devices (operator)."""
    with connected(server, token) as client:
        client.devices.unbind(device, user)
    out.print(f"{device} no longer trains for {user}", markup=False)


def _facts(request: DeviceRequestView) -> list[tuple[str, str]]:
    """Returns what an operator compares. Control characters, which the device may have sent, are replaced by `?`."""
    rows = [
        ("Name", request.name),
        ("Platform", request.platform),
        ("Fingerprint", request.fingerprint),
        ("Address", request.address),
    ]
    return [(name, "".join(letter if letter.isprintable() else "?" for letter in value)) for name, value in rows]
