"""`mobizo base`: the base models that jobs may use."""

from __future__ import annotations

from typing import Annotated

import typer

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, out, print_json, stop
from mobizo.cli.tables import print_table
from shared.catalog import BaseView

group = typer.Typer(no_args_is_help=True)


@group.callback()
def bases() -> None:
    """Show the base models that jobs may use."""


@group.command("list")
@server_command
def list_bases(connect: Connect, as_json: Json = False) -> None:
    """List base models: size, architecture, precisions that can train, and whether chat has a template."""
    with connect() as client:
        models = client.bases.list()
    if as_json:
        print_json([*models])
        return
    print_table(
        ("base", "architecture", "parameters", "context", "precisions", "chat", "Hub id"),
        [_row(base) for base in models],
        drop=("Hub id", "chat", "context", "precisions", "architecture"),
        empty="no base models; an operator registers one with `mobizo-server base add`",
    )


@group.command()
@server_command
def view(
    connect: Connect,
    name: Annotated[str, typer.Argument(metavar="BASE", help="Name of the base model.")],
    as_json: Json = False,
) -> None:
    """Show a base model."""
    with connect() as client:
        model = next((base for base in client.bases.list() if base.name == name), None)
    if model is None:
        raise stop(f"there is no base model {name!r}; `mobizo base list` shows them", 1)
    if as_json:
        print_json(model)
        return
    name, architecture, parameters, context, precisions, chat, hub_id = _row(model)
    out.print(
        f"{name}: {architecture}, {parameters} parameters, {context} tokens of context\n"
        f"precisions that can train: {precisions}\nchat template: {chat}\nHub id: {hub_id or 'none'}\n"
        f"sha256: {model.sha256}",
        markup=False,
        soft_wrap=True,
    )


def _row(base: BaseView) -> tuple[str, ...]:
    size, chat = f"{base.parameters / 1e6:,.0f} M", "yes" if base.chat_template else "no"
    context, precisions = str(base.context_length), " ".join(base.precisions)
    return base.name, base.architecture, size, context, precisions, chat, base.hub_id or ""
