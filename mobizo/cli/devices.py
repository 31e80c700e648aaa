"""`mobizo device`: enrollment of devices by an operator."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, Yes, err, out, show, stop
from mobizo.cli.tables import MAX_ROWS, Limit, print_items, printable, take_newest
from mobizo.resources.devices import Devices
from shared.invalid_fields import first_invalid
from shared.protocol import DeviceChange, DeviceView, EnrollmentRequest

group = typer.Typer(
    help="Enroll, list, label and revoke devices, and bind users to them (operator).", no_args_is_help=True
)
Users = Annotated[
    list[str] | None,
    typer.Option("--user", help="User whose data is on the device; repeatable. It gets jobs of these users only."),
]
Device = Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device, such as device_4f1c.")]
User = Annotated[str, typer.Argument(help="Name of the user, as jobs name it.")]
DEVICE_ID = re.compile(r"device_[0-9a-f]{24}")
NO_USERS = "No user was given: the device gets no job until `mobizo device bind DEVICE USER` names one."


@group.command("enroll-token")
@server_command
def create_enrollment_token(
    connect: Connect,
    user: Users = None,
    expires_in_seconds: Annotated[int, typer.Option(help="How long the token can be used.")] = 3600,
    as_json: Json = False,
) -> None:
    """Create a one-time token with which one device can enroll (operator)."""
    try:
        request = EnrollmentRequest(users=user or [], expires_in_seconds=expires_in_seconds)
    except ValidationError as error:
        raise stop(str(first_invalid(error)), 2) from error
    with connect() as client:
        enrollment = client.devices.create_enrollment_token(request)
    if not user:
        # Standard output is reserved for the token.
        err.print(NO_USERS, markup=False, soft_wrap=True)
    show(as_json, enrollment, enrollment.token)


@group.command("list")
@server_command
def list_devices(connect: Connect, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List devices, newest first."""
    with connect() as client:
        devices = take_newest(client.devices.list(), limit)
    rows = [
        (device.id, device.name, _state(device), " ".join(device.users), _labels(device), _last_seen(device))
        for device in devices
    ]
    print_items(
        as_json,
        devices,
        ("device", "name", "state", "users", "labels", "last seen"),
        rows,
        empty="no devices; `mobizo device enroll-token --user USER` lets one enroll",
    )


@group.command()
@server_command
def view(connect: Connect, device: Device, as_json: Json = False) -> None:
    """Show a device: its users, labels, data sets and state."""
    with connect("mobizo device list") as client:
        details = client.devices.get(device)
    memory = "" if details.memory_bytes is None else f"{details.memory_bytes:,} bytes"
    values = {
        "state": _state(details),
        "platform": details.platform,
        "users": " ".join(details.users),
        "labels": _labels(details),
        "data sets": " ".join(details.datasets),
        "memory": memory,
        "last seen": _last_seen(details),
    }
    lines = [f"{details.id}  {details.name}", *(f"{name}: {value or 'none'}" for name, value in values.items())]
    show(as_json, details, "\n".join(map(printable, lines)))


@group.command()
@server_command
def label(
    connect: Connect,
    device: Device,
    labels: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="KEY=VALUE sets a label, KEY= removes it.")
    ],
    as_json: Json = False,
) -> None:
    """Set or remove labels of a device, by which jobs select it. Other labels are unchanged."""
    pairs = [text.partition("=") for text in labels]
    if not all(equals for _, equals, _ in pairs):
        raise stop("a label is KEY=VALUE, or KEY= to remove it", 2)
    try:
        changes = DeviceChange(labels={key: value or None for key, _, value in pairs}).labels
    except ValidationError as error:
        raise stop(str(first_invalid(error)), 2) from error
    with connect("mobizo device list") as client:
        details = client.devices.label(device, changes)
    show(as_json, details, f"{details.name}: {_labels(details) or 'no labels'}")


@group.command()
@server_command
def bind(connect: Connect, device: Device, user: User, as_json: Json = False) -> None:
    """Bind a user to a device: from now on the device gets the user's jobs (operator)."""
    with connect("mobizo device list") as client:
        details = client.devices.bind(device, user)
    show(as_json, details, f"{details.name}: {', '.join(details.users)}")


@group.command()
@server_command
def unbind(connect: Connect, device: Device, user: User) -> None:
    """Unbind a user from a device. The user's jobs on it return to the queue for other devices (operator)."""
    with connect("mobizo device list") as client:
        client.devices.unbind(device, user)
    out.print(f"{device} no longer trains for {user}", markup=False)


@group.command()
@server_command
def revoke(
    connect: Connect,
    device: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the device.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Revoke a device with immediate effect. Its jobs return to the queue for other devices (operator)."""
    with connect("mobizo device list") as client:
        target = _find_device(client.devices, device)
        question = f"Revoke {printable(target.name)} ({target.id})? It must enroll again to get jobs."
        if not yes and not typer.confirm(question, err=True):
            raise stop("the device was not revoked", 1)
        revoked_device = client.devices.revoke(target.id)
    show(as_json, revoked_device, f"{printable(revoked_device.name)} is revoked")


def _find_device(devices: Devices, name_or_id: str) -> DeviceView:
    """Returns a device by its id, or by its name if one enrolled device has it. Ends the command otherwise."""
    if DEVICE_ID.fullmatch(name_or_id):
        return devices.get(name_or_id)
    matches = [device for device in devices.list() if device.name == name_or_id and device.revoked_at is None]
    if len(matches) != 1:
        ids = ", ".join(device.id for device in matches)
        message = f"{len(matches)} devices are named {name_or_id!r}; give the id of one: {ids}"
        raise stop(message if matches else f"no device is named {name_or_id!r}; `mobizo device list` shows them", 1)
    return matches[0]


def _state(device: DeviceView) -> str:
    if device.revoked_at is not None:
        return "revoked"
    return "cooldown" if device.cooldown_until and device.cooldown_until > datetime.now(UTC) else "enrolled"


def _labels(device: DeviceView) -> str:
    return " ".join(f"{key}={value}" for key, value in device.labels.items())


def _last_seen(device: DeviceView) -> str:
    return "never" if device.last_seen_at is None else f"{device.last_seen_at:%Y-%m-%d %H:%M} UTC"
