"""`mobizo base`: the base models that jobs may use."""

from __future__ import annotations

import typer

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json
from mobizo.cli.tables import print_items
from shared.catalog import BaseView

group = typer.Typer(no_args_is_help=True)


@group.callback()
def bases() -> None:
    """Show the base models that jobs may use."""


@group.command("list")
@server_command
def list_bases(connect: Connect, as_json: Json = False) -> None:
    """List base models: size, architecture, precisions that can train, and whether they have a chat template."""
    with connect() as client:
        models = client.bases.list()
    print_items(
        as_json,
        models,
        ("base", "architecture", "parameters", "context", "precisions", "chat", "Hub id"),
        [_row(base) for base in models],
        empty="no base models; an operator registers one with `mobizo-server base add`",
    )


def _row(base: BaseView) -> tuple[str, ...]:
    size, chat = f"{base.parameters / 1e6:,.0f} M", "yes" if base.chat_template else "no"
    context, precisions = str(base.context_length), " ".join(base.precisions)
    return base.name, base.architecture, size, context, precisions, chat, base.hub_id or ""
