"""Options that `mobizo`, `mobizo-server` and `mobizo-agent` have in common: `-h`, `--version` and `--reference`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from shared.command_page import command_page

CONTEXT = {"help_option_names": ["-h", "--help"]}


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"mobizo {version('mobizo')}")
        raise typer.Exit


def _show_reference(context: typer.Context, requested: bool) -> None:
    if requested:
        typer.echo(command_page(context), nl=False)
        raise typer.Exit


def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference",
            callback=_show_reference,
            is_eager=True,
            help="Print all commands and options in Markdown and exit.",
        ),
    ] = False,
) -> None:
    """Declares the options of the command itself; `app.callback()(common_options)` adds them to an application."""
