"""Commands that change versions and adapters: approve, promote, delete."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import typer

from mobizo.adapter_paths import split_reference
from mobizo.cli.adapters import REVISIONS, version_line
from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, Yes, show, stop
from mobizo.client import Client
from shared.protocol import AdapterVersion, AdapterView

commands = typer.Typer()
Reason = Annotated[str, typer.Option("--reason", help="Text for the audit trail.")]
ExactVersion = Annotated[str, typer.Argument(metavar="ADAPTER@REVISION", help=f"Adapter and version. {REVISIONS}")]


def _require_revision(reference: str) -> tuple[str, str]:
    """Returns the adapter and the revision of ADAPTER@REVISION. Ends the command with status 2 without a revision."""
    name, revision = split_reference(reference)
    if revision is None:
        raise stop(f"name the version as {name}@REVISION; `mobizo adapter versions {name}` lists them", 2)
    return name, revision


def _change(connect: Connect, as_json: bool, change: Callable[[Client], AdapterView | AdapterVersion]) -> None:
    """Changes an adapter or a version on the server, and prints its new state."""
    with connect() as client:
        item = change(client)
    if isinstance(item, AdapterVersion):
        text, removed_after = version_line(item), item.removed_after
    else:
        main = "none" if item.main is None else f"v{item.main}"
        text, removed_after = f"{item.name}: main {main}", item.removed_after
    note = "" if removed_after is None else f"; deleted, can be restored until {removed_after:%Y-%m-%d %H:%M} UTC"
    show(as_json, item, text + note)


@commands.command()
@server_command
def promote(
    connect: Connect,
    version: ExactVersion,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Make an approved version `main`, such as an earlier one. The next approved version replaces it."""
    _change(connect, as_json, lambda client: client.adapters.promote(*_require_revision(version), reason))


@commands.command()
@server_command
def approve(
    connect: Connect,
    version: ExactVersion,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Approve a held version."""
    _change(connect, as_json, lambda client: client.adapters.approve(*_require_revision(version), reason))


@commands.command()
@server_command
def delete(
    connect: Connect,
    reference: Annotated[
        str,
        typer.Argument(metavar="ADAPTER[@REVISION]", help=f"A version, or an adapter with all versions. {REVISIONS}"),
    ],
    yes: Yes = False,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Delete a version or a whole adapter. Both can be restored for some time."""
    name, revision = split_reference(reference)
    if revision is None and not yes and not typer.confirm(f"Delete {name} with all its versions?", err=True):
        raise stop(f"nothing was deleted; `mobizo adapter delete {name}@REVISION` deletes one version", 1)
    _change(connect, as_json, lambda client: client.adapters.delete(name, revision, reason))


@commands.command()
@server_command
def undelete(
    connect: Connect,
    reference: Annotated[
        str, typer.Argument(metavar="ADAPTER[@vN]", help="A deleted adapter, or a deleted version by its number.")
    ],
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Restore a deleted version or a deleted adapter."""
    name, revision = split_reference(reference)
    if revision is not None and not re.fullmatch(r"v?[1-9][0-9]{0,8}", revision):
        raise stop(f"a deleted version has only its number: mobizo adapter undelete {name}@v3, not @{revision}", 2)
    number = None if revision is None else int(revision.removeprefix("v"))
    _change(connect, as_json, lambda client: client.adapters.undelete(name, number, reason))
