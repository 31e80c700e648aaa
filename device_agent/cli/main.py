"""The `mobizo-agent` command's entry point: imports what a command needs, and translates errors into exit statuses."""

from __future__ import annotations

import sys

import typer

from shared.command_line import CONTEXT, common_options
from shared.errors import BadRequest, MobizoError

USAGE, FAILURE = 2, 1  # exit statuses
OFFLINE = ("predict", "chat")  # a person waits for their first token: modules of the other commands are not imported

HELP = "Train personal adapters on this device for a server, and use them offline."


def new_app() -> typer.Typer:
    """Returns the application without its commands."""
    app = typer.Typer(
        name="mobizo-agent",
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    app.callback(help=HELP)(common_options)
    return app


def app_for(arguments: list[str]) -> typer.Typer:
    """Returns an application that has at least the command that `arguments` name."""
    if arguments[:1] and arguments[0] in OFFLINE:
        from device_agent.cli.inference import app as commands

        app = new_app()
        app.add_typer(commands)
        return app
    from device_agent.cli.app import app as whole

    return whole


def complete_adb_option(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--adb` without a serial number rewritten to `--adb=`, so that the option may stand
    alone.
    """
    completed = []
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        completed.append("--adb=" if argument == "--adb" and following.startswith("-") else argument)
    return completed


def main() -> None:
    """Entry point: runs the command and turns a MobizoError into one line on standard error and an exit status."""
    arguments = sys.argv[1:]
    try:
        app_for(arguments)(complete_adb_option(arguments))
    except MobizoError as error:
        from rich.console import Console

        from device_agent.errors import AlreadyRunning, NotEnrolled

        Console(stderr=True, soft_wrap=True, highlight=False).print(error.detail, style="red", markup=False)
        usage = isinstance(error, (BadRequest, NotEnrolled, AlreadyRunning))
        raise SystemExit(USAGE if usage else FAILURE) from None
