"""The `mobizo` command: all its subcommands in one Typer application."""

from __future__ import annotations

import typer

from mobizo.cli import (
    adapter_grants,
    adapters,
    bases,
    cohorts,
    devices,
    jobs,
    privacy,
    scoring,
    simulate,
    tokens,
    versions,
)
from shared.command_line import CONTEXT, common_options

PANELS = {
    "Jobs": (jobs.commands,),
    "Adapters": (adapters.commands, versions.commands, adapter_grants.commands),
    "Inference on the server": (scoring.commands,),
    "Access and devices": (tokens.commands, devices.commands),
    "Federation and privacy": (simulate.commands,),
}

HELP = "Submit personalization jobs, watch them, download adapters."
app = typer.Typer(help=HELP, no_args_is_help=True, context_settings=CONTEXT)
app.callback(help=HELP)(common_options)
for panel, groups in PANELS.items():
    for group in groups:
        for command in group.registered_commands:
            command.rich_help_panel = panel
            app.registered_commands.append(command)
app.add_typer(bases.group, name="base", rich_help_panel="Jobs")
app.add_typer(tokens.group, name="tokens", rich_help_panel="Access and devices")
app.add_typer(devices.group, name="devices", rich_help_panel="Access and devices")
app.add_typer(cohorts.group, name="cohort", rich_help_panel="Federation and privacy")
app.add_typer(privacy.group, name="privacy", rich_help_panel="Federation and privacy")


def main() -> None:
    """Entry point of the console script."""
    app()
