"""What the commands `mobizo`, `mobizo-server` and `mobizo-agent` have in common: `-h` and `--version`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

CONTEXT = {"help_option_names": ["-h", "--help"]}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mobizo {version('mobizo')}")
        raise typer.Exit


def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Takes the options of the command itself; `app.callback()(common_options)` adds them to an application."""
