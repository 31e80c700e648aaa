"""`mobizo base`: the base models that jobs may use."""

from __future__ import annotations

import typer
from rich.table import Table

from mobizo.cli.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json

group = typer.Typer(no_args_is_help=True)


@group.callback()
def bases() -> None:
    """Show the base models that jobs may use."""


@group.command("list")
def list_bases(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List base models: size, architecture, precisions that can train, and whether chat has a template."""
    with connected(server, token) as client:
        found = client.bases.list()
    if as_json:
        print_json([*found])
        return
    table = Table("name", "architecture", "parameters", "context", "precisions", "chat", "Hub id", box=None)
    for base in found:
        size, chat = f"{base.parameters / 1e6:,.0f} M", "yes" if base.chat_template else "no"
        context, precisions = str(base.context_length), " ".join(base.precisions)
        table.add_row(base.name, base.architecture, size, context, precisions, chat, base.hub_id or "")
    out.print(table)
