"""The command line `mobizo-server`: set up, run and maintain a server, and compile programs."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import sys
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from server.cli.bases import app as bases
from server.cli.calibrate import calibrate
from server.cli.compile import compile_program
from server.cli.console import complaints
from shared.command_line import CONTEXT, common_options
from shared.errors import MobizoError
from shared.invalid_fields import first_invalid


class Commands(TyperGroup):
    """Imports the commands that need a database only when one is used: the import takes half a second."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command with this name."""
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        self._load()
        return super().list_commands(ctx)

    def _load(self) -> None:
        from server.cli.access import app as access
        from server.cli.catalog import app as catalog
        from server.cli.home import app as home
        from server.cli.keys import app as keys
        from server.cli.maintenance import app as maintenance
        from server.wiring import wire

        wire()
        self.commands = {
            **typer.main.get_group(home).commands,
            **typer.main.get_group(maintenance).commands,
            **typer.main.get_group(access).commands,
            **typer.main.get_group(keys).commands,
            **typer.main.get_group(catalog).commands,
            **self.commands,
        }


HELP = "A server that personalizes language models on the devices that hold the data."
app = typer.Typer(
    cls=Commands, help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=CONTEXT
)
app.callback(help=HELP)(common_options)
app.command("compile")(compile_program)
app.command("calibrate")(calibrate)
app.add_typer(bases, name="base")


def main() -> None:
    """Runs the command line. An error is printed as one line and ends it with exit code 1."""
    try:
        app()
    except MobizoError as error:
        complaints.print(f"error: {error.detail}", style="red", markup=False)
        sys.exit(1)
    except ValidationError as error:
        if error.title != "Settings":
            raise
        # The value is not printed: it may be a password.
        first = first_invalid(error)
        name = f"MOBIZO_{first.location[0]}".upper() if first.location else "MOBIZO_*"
        complaints.print(f"error: {name}: {first.message}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
