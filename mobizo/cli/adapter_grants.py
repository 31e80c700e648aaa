"""`mobizo adapter grant` and `mobizo adapter revoke`: which devices may download an adapter that they did not train."""

from __future__ import annotations

from typing import Annotated

import typer

from mobizo.cli.adapters import Name
from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, out, print_json

commands = typer.Typer()
DeviceId = Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device, as `mobizo-agent status` shows it.")]


@commands.command()
@server_command
def grant(
    connect: Connect,
    name: Name,
    device_id: DeviceId,
    as_json: Json = False,
) -> None:
    """Let a device download an adapter's published versions.

    A device that trained the adapter needs no grant.
    """
    with connect() as client:
        new_grant = client.adapter_grants.create(name, device_id)
    print_json(new_grant) if as_json else out.print(
        f"{new_grant.device_id} may download {new_grant.adapter}", markup=False
    )


@commands.command()
@server_command
def revoke(connect: Connect, name: Name, device_id: DeviceId) -> None:
    """Revoke a grant. Versions that were already downloaded remain on the device."""
    with connect() as client:
        client.adapter_grants.revoke(name, device_id)
    out.print(f"{device_id} may no longer download {name}", markup=False)
