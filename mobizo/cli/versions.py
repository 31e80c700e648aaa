"""Commands that change versions and adapters: approve, promote, tag, deprecate, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from mobizo.cli.adapters import Name, RevisionArgument, RevisionOption, version_line
from mobizo.cli.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop
from shared.protocol import AdapterVersion, AdapterView

commands = typer.Typer()
Reason = Annotated[str, typer.Option("--reason", help="Text for the audit trail.")]


def _show(found: AdapterView | AdapterVersion, as_json: bool) -> None:
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
    with connected(server, token) as client:
        _show(client.adapters.promote(name, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.rollback(name, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.tag(name, tag, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.untag(name, tag, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.approve(name, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.reject(name, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.deprecate(name, revision, message, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.delete(name, revision, reason), as_json)


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
    with connected(server, token) as client:
        _show(client.adapters.undelete(name, version, reason), as_json)
