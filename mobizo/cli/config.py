"""`mobizo config`: the settings in effect, their origins, and the default profile."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, print_json, stop
from mobizo.cli.tables import print_table
from mobizo.profiles import config_file, read_profiles, write_profiles
from shared.errors import BadRequest

group = typer.Typer(help="Show the settings of this command; choose a profile.", invoke_without_command=True)
TOKEN_PREFIX_LENGTH = 8  # of a token: enough to recognize one


@group.callback()
@server_command
def config(context: typer.Context, connect: Connect, as_json: Json = False) -> None:
    """Show the settings in effect and their origins."""
    if context.invoked_subcommand is not None:
        return
    settings = connect.settings()
    if settings.token.value is not None:
        settings = replace(settings, token=replace(settings.token, value=mask_token(settings.token.value)))
    if as_json:
        print_json(asdict(settings) | {"file": str(config_file())})
        return
    shown_settings = {"profile": settings.profile, "server": settings.server, "token": settings.token}
    rows = [(name, item.value or "", item.origin) for name, item in shown_settings.items()]
    print_table(("setting", "value", "origin"), [*rows, ("file", str(config_file()), "")])


def mask_token(token: str) -> str:
    """Returns the first letters of a token, at most a third of it."""
    return token[: min(TOKEN_PREFIX_LENGTH, len(token) // 3)] + "..."


@group.command()
def use(profile: Annotated[str, typer.Argument(help="Name of the profile.")]) -> None:
    """Make a profile the default one."""
    try:
        profiles = read_profiles(config_file())
        if profile not in profiles.profiles:
            raise BadRequest(f"there is no profile {profile!r}; `mobizo login --profile {profile}` creates it")
        write_profiles(config_file(), replace(profiles, current=profile))
    except BadRequest as error:
        raise stop(error.detail, 2) from error
