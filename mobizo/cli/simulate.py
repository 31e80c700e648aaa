"""`mobizo simulate`: passes its arguments to the simulation, which needs further packages."""

from __future__ import annotations

import typer

from mobizo.cli.console import stop

commands = typer.Typer()


@commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Simulate a cohort of virtual devices on this machine."""
    try:
        # Imported here because it loads the compiler and the device agent, which the client does not need.
        from simulation.cli import main as run

        run(context.args)
    except ImportError as error:
        raise stop(
            f"the package {error.name}, which a simulation needs, is not installed: pip install 'mobizo[simulate]'", 1
        ) from error
