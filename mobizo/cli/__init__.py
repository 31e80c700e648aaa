"""The `mobizo` command: all its subcommands in one Typer application."""

from __future__ import annotations

import typer

from mobizo.cli import (
    adapters,
    bases,
    cohorts,
    config,
    devices,
    jobs,
    login,
    privacy,
    quickstart,
    scoring,
    simulate,
    tokens,
    versions,
)
from shared.command_line import CONTEXT, common_options

HELP = "Submit personalization jobs, watch them, download adapters."
EXIT_STATUS = (
    "Exit status: 0 on success; 1 if the server refuses a request or cannot be reached, or if a watched job fails or "
    "is cancelled; 2 for wrong options, files that cannot be used, or a missing token. Start with `mobizo login`."
)
app = typer.Typer(help=HELP, no_args_is_help=True, context_settings=CONTEXT)
app.callback(help=HELP, epilog=EXIT_STATUS)(common_options)

adapter = typer.Typer(help="Adapters and their versions: list, download, approve, promote.", no_args_is_help=True)
for part in (adapters.commands, versions.commands):
    adapter.add_typer(part)

NOUNS = "Nouns"
app.add_typer(jobs.group, name="job", rich_help_panel=NOUNS)
app.add_typer(adapter, name="adapter", rich_help_panel=NOUNS)
app.add_typer(bases.group, name="base", rich_help_panel=NOUNS)
app.add_typer(devices.group, name="device", rich_help_panel=NOUNS)
app.add_typer(cohorts.group, name="cohort", rich_help_panel=NOUNS)
app.add_typer(privacy.group, name="privacy", rich_help_panel=NOUNS)
app.add_typer(tokens.group, name="token", rich_help_panel=NOUNS)
app.add_typer(config.group, name="config", rich_help_panel=NOUNS)
for commands in (quickstart.commands, scoring.commands, simulate.commands, login.commands):
    app.add_typer(commands)


def main() -> None:
    """Entry point of the console script."""
    app()
