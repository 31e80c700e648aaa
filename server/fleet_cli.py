"""`mobizo-server`'s commands about the machines that train: devices, and the runner builds that they are offered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from server.artifacts.naming import hold
from server.artifacts.opening import open_artifacts
from server.console import Json, Tenant, open_home, output, tell, tell_rows
from server.devices.repository import DeviceRepository
from server.devices.service import DeviceService
from server.leases.service import LeaseService
from server.runners.archive import read_archive
from server.runners.repository import RunnerRepository
from server.runners.service import RunnerService
from server.succession.service import KeyService
from shared.access import DEFAULT_TENANT
from shared.canonical import sha256_hex
from shared.errors import BadRequest
from shared.protocol import DeviceChange, RunnerBuild

app = typer.Typer()
devices = typer.Typer(help="Devices that enrolled.", no_args_is_help=True)
runners = typer.Typer(help="Builds of the native runner for devices to download.", no_args_is_help=True)
app.add_typer(devices, name="devices")
app.add_typer(runners, name="runners")


@devices.command("list")
def list_devices(tenant: Tenant = DEFAULT_TENANT, as_json: Json = False) -> None:
    """List a tenant's devices."""
    _, database = open_home()
    with database.reading() as session:
        rows = [device.view().model_dump(mode="json") for device in DeviceRepository(session).all(tenant)]
    if not as_json:
        for row in rows:
            row["labels"] = " ".join(f"{key}={value}" for key, value in row["labels"].items())
    tell_rows(as_json, rows, ("id", "name", "platform", "labels", "last_seen_at", "revoked_at"))


@devices.command("label")
def label_device(
    device: Annotated[str, typer.Argument(help="its id or name")],
    labels: Annotated[list[str], typer.Argument(help="KEY=VALUE sets one, KEY= removes it", metavar="KEY=VALUE...")],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Label a device, so that jobs may ask for it; other labels stay."""
    changes: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadRequest(f"{text!r} must be KEY=VALUE, or KEY= to remove it")
        changes[key] = value or None
    try:
        change = DeviceChange(labels=changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"label {first['loc'][1]}: {first['msg']}") from error
    _, database = open_home()
    with database.writing() as session:
        service = DeviceService(session)
        found = service.found(tenant, device)
        service.label(found, change.labels)
        name, now = f"{found.name} ({found.id})", found.labels.root
    shown = ", ".join(f"{key}={value}" for key, value in now.items()) or "no labels"
    tell(as_json, {"labels": now}, f"{name}: {shown}")


@devices.command("revoke")
def revoke_device(
    device: Annotated[str, typer.Argument(help="its id or name")], tenant: Tenant = DEFAULT_TENANT
) -> None:
    """Shut a device out at once; what it trained waits for another device."""
    settings, database = open_home()
    with database.writing() as session:
        found = DeviceService(session).revoke(tenant, device)
        LeaseService(session, settings.lease_seconds).take_back_revoked(found.id)
        name = f"{found.name} ({found.id})"
    output.print(f"{name} is revoked", markup=False)


@runners.command("add")
def add_runner(
    file: Annotated[Path, typer.Argument(help="a .tar.gz of mobizo-runner and lib/", exists=True, dir_okay=False)],
    platform: Annotated[str, typer.Option(help="system and machine, such as linux-aarch64")],
    version: Annotated[str, typer.Option(help="of mobizo: it serves agents of the same")],
    executorch: Annotated[str, typer.Option(help="the ExecuTorch that it links")],
    as_json: Json = False,
) -> None:
    """Sign a runner and offer it to a platform's devices, in place of the one before."""
    settings, database = open_home()
    data = read_archive(file)
    try:
        build = RunnerBuild(
            platform=platform, version=version, executorch=executorch, size=len(data), sha256=sha256_hex(data)
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"--{first['loc'][0]}: {first['msg']}") from error
    artifacts = open_artifacts(settings)
    artifacts.put(data)
    with database.writing() as session:
        hold(session, artifacts, [build.sha256])
        RunnerService(session).offer(build, KeyService(session, settings).private())
    text = f"{platform}: mobizo {version}, ExecuTorch {executorch}, {build.size:,} bytes, {build.sha256}"
    tell(as_json, build.model_dump(mode="json"), text)


@runners.command("list")
def list_runners(as_json: Json = False) -> None:
    """List runner builds."""
    _, database = open_home()
    with database.reading() as session:
        rows = [
            runner.signed.build.model_dump(exclude={"format"}) | {"added_at": runner.added_at.isoformat()}
            for runner in RunnerRepository(session).all()
        ]
    tell_rows(as_json, rows, ("platform", "version", "executorch", "size", "sha256", "added_at"))
