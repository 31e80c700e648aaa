"""Commands that change versions and adapters: approve, promote, tag, deprecate, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from mobizo.cli.adapters import Name, RevisionArgument, RevisionOption, version_line
from mobizo.cli.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop
from mobizo.client import Client
from shared.protocol import AdapterVersion, AdapterView

commands = typer.Typer()
Reason = Annotated[str, typer.Option("--reason", help="Text for the audit trail.")]


def _change(server: str, token: str, as_json: bool, change: Callable[[Client], AdapterView | AdapterVersion]) -> None:
    """Changes an adapter or a version on the server, and prints it as it is now."""
    with connected(server, token) as client:
        found = change(client)
    if as_json:
        print_json(found)
        return
    if isinstance(found, AdapterVersion):
        text, until = version_line(found), found.removed_after
    else:
        main = "none" if found.main is None else f"v{found.main}"
        tags = "".join(f", {tag} v{version}" for tag, version in sorted(found.tags.items()))
        text, until = f"{found.name}: main {main}{tags}", found.removed_after
    kept = "" if until is None else f"; deleted, can be restored until {until:%Y-%m-%d %H:%M} UTC"
    out.print(text + kept, markup=False, soft_wrap=True)


@commands.command()
def promote(
    name: Name,
    revision: RevisionArgument,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make an approved version `main`."""
    _change(server, token, as_json, lambda client: client.adapters.promote(name, revision, reason))


@commands.command()
def rollback(
    name: Name,
    revision: Annotated[str | None, typer.Option("--revision", "-r", help="Default: the previous `main`.")] = None,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make an earlier version `main` again. The next approved version replaces it."""
    _change(server, token, as_json, lambda client: client.adapters.rollback(name, revision, reason))


@commands.command()
def tag(
    name: Name,
    tag: Annotated[str, typer.Argument(help="Name of the tag.")],
    revision: RevisionOption = "main",
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Set a tag on a version, or move the tag to it."""
    _change(server, token, as_json, lambda client: client.adapters.tag(name, tag, revision, reason))


@commands.command()
def untag(
    name: Name,
    tag: Annotated[str, typer.Argument(help="Name of the tag.")],
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Remove a tag."""
    _change(server, token, as_json, lambda client: client.adapters.untag(name, tag, reason))


@commands.command()
def approve(
    name: Name,
    revision: RevisionArgument,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Approve a held or deprecated version."""
    _change(server, token, as_json, lambda client: client.adapters.approve(name, revision, reason))


@commands.command()
def reject(
    name: Name,
    revision: RevisionArgument,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Delete a held version."""
    _change(server, token, as_json, lambda client: client.adapters.reject(name, revision, reason))


@commands.command()
def deprecate(
    name: Name,
    revision: RevisionArgument,
    message: Annotated[str, typer.Option(help="Warning for users of the version.")],
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Mark a version as deprecated. It can still be downloaded."""
    _change(server, token, as_json, lambda client: client.adapters.deprecate(name, revision, message, reason))


@commands.command()
def delete(
    name: Name,
    revision: Annotated[str | None, typer.Option("--revision", "-r", help="Version to delete.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete the adapter with all its versions.")] = False,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Delete a version or a whole adapter. Both can be restored for some time."""
    if (revision is None) != everything:
        raise stop("give either --revision or --all", 2)
    _change(server, token, as_json, lambda client: client.adapters.delete(name, revision, reason))


@commands.command()
def undelete(
    name: Name,
    version: Annotated[int | None, typer.Option(help="Number of the version. Default: the adapter.")] = None,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Restore a deleted version or a deleted adapter."""
    _change(server, token, as_json, lambda client: client.adapters.undelete(name, version, reason))
