"""The `mobizo-server` commands for devices."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from server.cli.console import Json, Tenant, checked_users, open_home, output, tell, tell_rows
from server.identity.devices import service as devices_service
from server.identity.devices.repository import BindingRepository, DeviceRepository
from server.identity.devices.service import BindingService, DeviceService
from shared.access import DEFAULT_TENANT
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.protocol import DeviceChange

app = typer.Typer()
devices = typer.Typer(help="Enrolled devices.", no_args_is_help=True)
app.add_typer(devices, name="device")


@devices.command("list")
def list_devices(tenant: Tenant = DEFAULT_TENANT, as_json: Json = False) -> None:
    """List a tenant's devices."""
    _, database = open_home()
    with database.reading() as session:
        all_devices = DeviceRepository(session).all(tenant)
        users = BindingRepository(session).users_of([device.id for device in all_devices])
        rows = [device.view(users[device.id]).model_dump(mode="json") for device in all_devices]
    if not as_json:
        for row in rows:
            row["users"] = " ".join(row["users"])
            row["labels"] = " ".join(f"{key}={value}" for key, value in row["labels"].items())
    tell_rows(as_json, rows, ("id", "name", "platform", "users", "labels", "last_seen_at", "revoked_at"))


@devices.command("enroll-token")
def enroll_token(
    tenant: Tenant = DEFAULT_TENANT,
    expires_in_seconds: Annotated[int, typer.Option(min=1, help="lifetime of the token")] = 3600,
    user: Annotated[
        list[str] | None,
        typer.Option(help="user whose data is on the device; repeatable; without one it gets no job until it is bound"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a one-time token that enrolls one device, which trains for the given users."""
    users = checked_users(user or [])
    _, database = open_home()
    with database.writing() as session:
        enrollment = DeviceService(session).invite(tenant, expires_in_seconds, users)
    tell(as_json, enrollment.model_dump(mode="json"), enrollment.token)


@devices.command("bind")
def bind_users(
    device: Annotated[str, typer.Argument(help="id or name of the device")],
    users: Annotated[list[str], typer.Argument(help="users whose data is on the device", metavar="USER...")],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Bind users to a device: from now on it gets their jobs."""
    names = checked_users(users)
    _, database = open_home()
    with database.writing() as session:
        service = DeviceService(session)
        enrolled = service.get(tenant, service.by_name_or_id(tenant, device).id, lock=True)
        BindingService(session).bind(enrolled, names)
        text, bound_users = f"{enrolled.name} ({enrolled.id})", sorted(BindingRepository(session).users(enrolled.id))
    tell(as_json, {"users": bound_users}, f"{text}: {', '.join(bound_users)}")


@devices.command("unbind")
def unbind_users(
    device: Annotated[str, typer.Argument(help="id or name of the device")],
    users: Annotated[list[str], typer.Argument(help="users whose jobs it must not train", metavar="USER...")],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Unbind users from a device. Their jobs on it return to the queue for other devices."""
    names = checked_users(users)
    settings, database = open_home()
    with database.writing() as session:
        service = DeviceService(session)
        enrolled = service.get(tenant, service.by_name_or_id(tenant, device).id, lock=True)
        for user in names:
            BindingService(session).unbind(enrolled, user, settings)
        text, bound_users = f"{enrolled.name} ({enrolled.id})", sorted(BindingRepository(session).users(enrolled.id))
    tell(as_json, {"users": bound_users}, f"{text}: {', '.join(bound_users) or 'no users'}")


@devices.command("label")
def label_device(
    device: Annotated[str, typer.Argument(help="id or name of the device")],
    labels: Annotated[
        list[str], typer.Argument(help="KEY=VALUE sets a label, KEY= removes it", metavar="KEY=VALUE...")
    ],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Set or remove labels of a device. Jobs select devices by label. Other labels are unchanged."""
    changes: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadRequest(f"{text!r} must be KEY=VALUE, or KEY= to remove it")
        changes[key] = value or None
    try:
        change = DeviceChange(labels=changes)
    except ValidationError as error:
        first = first_invalid(error)
        raise BadRequest(f"label {first.location[1]}: {first.message}") from error
    _, database = open_home()
    with database.writing() as session:
        service = DeviceService(session)
        labeled = service.by_name_or_id(tenant, device)
        service.label(labeled, change.labels)
        name, current = f"{labeled.name} ({labeled.id})", labeled.labels.root
    text = ", ".join(f"{key}={value}" for key, value in current.items()) or "no labels"
    tell(as_json, {"labels": current}, f"{name}: {text}")


@devices.command("revoke")
def revoke_device(
    device: Annotated[str, typer.Argument(help="id or name of the device")], tenant: Tenant = DEFAULT_TENANT
) -> None:
    """Revoke a device immediately. Its running jobs return to the queue for other devices."""
    settings, database = open_home()
    with database.writing() as session:
        revoked = devices_service.revoke_device(session, settings, tenant, device)
        name = f"{revoked.name} ({revoked.id})"
    output.print(f"{name} is revoked", markup=False)
