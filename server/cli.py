"""`mobizo-server`: set up, run and look after a server; compile and inspect programs. Errors become one line."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import sys
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperGroup

from server.calibrate_cli import calibrate
from server.compile_cli import compile_program, inspect_file
from server.describe_cli import openapi
from shared.errors import MobizoError

complaints = Console(stderr=True, highlight=False, soft_wrap=True)


class Commands(TyperGroup):
    """Commands that need a home bring a database along, which takes half a second: it comes when one is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name."""
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """All names: the home's first."""
        self._load()
        return super().list_commands(ctx)

    def _load(self) -> None:
        from server.access_cli import app as access
        from server.calibrations_cli import app as calibrations
        from server.care_cli import app as care
        from server.files_cli import app as files
        from server.fleet_cli import app as fleet
        from server.home_cli import app as home
        from server.keys_cli import app as keys
        from server.programs_cli import app as programs

        self.commands = {
            **typer.main.get_group(home).commands,
            **typer.main.get_group(care).commands,
            **typer.main.get_group(access).commands,
            **typer.main.get_group(fleet).commands,
            **typer.main.get_group(files).commands,
            **typer.main.get_group(keys).commands,
            **typer.main.get_group(programs).commands,
            **typer.main.get_group(calibrations).commands,
            **self.commands,
        }


app = typer.Typer(
    cls=Commands,
    help="A server that personalizes language models on the devices that hold the data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("compile")(compile_program)
app.command("calibrate")(calibrate)
app.command("inspect")(inspect_file)
app.command("openapi")(openapi)


def main() -> None:
    """The command; errors become one line and exit code 1."""
    try:
        app()
    except MobizoError as error:
        complaints.print(f"error: {error.detail}", style="red", markup=False)
        sys.exit(1)
    except ValidationError as error:
        first = error.errors()[0]
        if error.title != "Settings":
            raise
        # Never the value: it may be a password.
        name = f"MOBIZO_{first['loc'][0]}".upper() if first["loc"] else "MOBIZO_*"
        complaints.print(f"error: {name}: {first['msg']}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
