"""`mobizo`'s commands that decide what versions are: approved, `main`, tagged, deprecated, deleted."""

from __future__ import annotations

from typing import Annotated

import typer

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop
from mobizo.registry_cli import Name, Revision, Which, line
from shared.protocol import AdapterVersion, AdapterView

commands = typer.Typer()
Reason = Annotated[str, typer.Option("--reason", help="for the audit trail")]


def _show(found: AdapterView | AdapterVersion, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if isinstance(found, AdapterVersion):
        text, until = line(found), found.removed_after
    else:
        main = "none" if found.main is None else f"v{found.main}"
        tags = "".join(f", {tag} v{version}" for tag, version in sorted(found.tags.items()))
        text, until = f"{found.name}: main {main}{tags}", found.removed_after
    kept = "" if until is None else f"; deleted, can be taken back until {until:%Y-%m-%d %H:%M} UTC"
    out.print(text + kept, markup=False, soft_wrap=True)


@commands.command()
def promote(
    name: Name,
    revision: Which,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make an approved version `main`."""
    with connected(server, token) as client:
        _show(client.promote(name, revision, reason), as_json)


@commands.command()
def rollback(
    name: Name,
    revision: Annotated[str | None, typer.Option("--revision", "-r", help="default: what `main` was before")] = None,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make an earlier version `main` again, until the next one is approved."""
    with connected(server, token) as client:
        _show(client.rollback(name, revision, reason), as_json)


@commands.command()
def tag(
    name: Name,
    tag: Annotated[str, typer.Argument(help="a word for a version")],
    revision: Revision = "main",
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Put a tag on a version, or move it there."""
    with connected(server, token) as client:
        _show(client.tag(name, tag, revision, reason), as_json)


@commands.command()
def untag(
    name: Name,
    tag: str,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Take a tag away."""
    with connected(server, token) as client:
        _show(client.untag(name, tag, reason), as_json)


@commands.command()
def approve(
    name: Name,
    revision: Which,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Approve a version that is held or deprecated."""
    with connected(server, token) as client:
        _show(client.approve(name, revision, reason), as_json)


@commands.command()
def reject(
    name: Name,
    revision: Which,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Delete a version that is held."""
    with connected(server, token) as client:
        _show(client.reject(name, revision, reason), as_json)


@commands.command()
def deprecate(
    name: Name,
    revision: Which,
    message: Annotated[str, typer.Option(help="for those who use it")],
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Warn of a version; it can still be had."""
    with connected(server, token) as client:
        _show(client.deprecate(name, revision, message, reason), as_json)


@commands.command()
def delete(
    name: Name,
    revision: Annotated[str | None, typer.Option("--revision", "-r", help="this version; else --all")] = None,
    everything: Annotated[bool, typer.Option("--all", help="the adapter with all its versions")] = False,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Delete a version, or the whole adapter; for a while it can be taken back."""
    if (revision is None) != everything:
        raise stop("say which version (--revision), or --all of them", 2)
    with connected(server, token) as client:
        _show(client.delete(name, revision, reason), as_json)


@commands.command()
def undelete(
    name: Name,
    version: Annotated[int | None, typer.Option(help="this version's number; default: the adapter")] = None,
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Take a deleted version back, or the whole adapter."""
    with connected(server, token) as client:
        _show(client.undelete(name, version, reason), as_json)


@commands.command()
def assign(
    name: Name,
    device_id: Annotated[str, typer.Argument(metavar="DEVICE", help="its id, as `mobizo-agent status` shows it")],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Let a device have an adapter's published versions; one that trained it may anyway."""
    with connected(server, token) as client:
        made = client.assign(name, device_id)
    print_json(made) if as_json else out.print(f"{made.device_id} may have {made.adapter}", markup=False)


@commands.command()
def withdraw(
    name: Name,
    device_id: Annotated[str, typer.Argument(metavar="DEVICE", help="its id")],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
) -> None:
    """Take that back; what the device has fetched stays with it."""
    with connected(server, token) as client:
        client.withdraw(name, device_id)
    out.print(f"{device_id} may have {name} no more", markup=False)
