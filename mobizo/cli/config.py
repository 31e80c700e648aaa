"""`mobizo config`: the settings in effect and their origins, and changes of the file that contains the profiles."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated

import typer

from mobizo.cli.connect import Connect, ProfileName, server_command
from mobizo.cli.console import Json, err, out, print_json, stop
from mobizo.cli.settings import choose_profile
from mobizo.cli.tables import print_table
from mobizo.profiles import Profile, Profiles, check_name, config_file, read_profiles, write_profiles
from shared.errors import BadRequest

group = typer.Typer(help="Show and change the settings of this command.", invoke_without_command=True)
TOKEN_PREFIX_LENGTH = 8  # of a token: enough to recognize one


class Key(StrEnum):
    """A setting that the file may contain. PROFILE is the name of the profile that is used by default."""

    PROFILE = "profile"
    SERVER = "server"
    TOKEN = "token"  # noqa: S105 - the name of a setting


KeyArgument = Annotated[Key, typer.Argument(metavar="KEY", help="profile (the default one), server or token.")]


@group.callback()
@server_command
def config(context: typer.Context, connect: Connect, as_json: Json = False) -> None:
    """Show the settings in effect and their origins; subcommands change the file."""
    if context.invoked_subcommand is not None:
        return
    settings = connect.settings()
    if settings.token.value is not None:
        settings = replace(settings, token=replace(settings.token, value=mask_token(settings.token.value)))
    if as_json:
        print_json(asdict(settings) | {"file": str(config_file())})
        return
    shown_settings = {"profile": settings.profile, "server": settings.server, "token": settings.token}
    print_table(
        ("setting", "value", "origin"), [(name, item.value or "", item.origin) for name, item in shown_settings.items()]
    )


def mask_token(token: str) -> str:
    """Returns the first letters of a token, at most a third of it."""
    return token[: min(TOKEN_PREFIX_LENGTH, len(token) // 3)] + "..."


@group.command("path")
def print_path() -> None:
    """Print the path of the file, which need not exist."""
    out.print(str(config_file()), markup=False, soft_wrap=True)


@group.command("set")
def set_value(
    key: KeyArgument,
    value: Annotated[str, typer.Argument(help="New value.")],
    profile: ProfileName = None,
) -> None:
    """Set the default profile, or the server of a profile. `mobizo login` sets a token."""
    if key is Key.TOKEN:
        raise stop("a command line is no place for a token: `mobizo login` stores one", 2)
    try:
        profiles = read_profiles(config_file())
        if key is Key.PROFILE:
            check_name(value)
            if value not in profiles.profiles:
                raise BadRequest(f"there is no profile {value!r}; `mobizo login --profile {value}` creates it")
            write_profiles(config_file(), replace(profiles, current=value))
            return
        name, _ = choose_profile(profile, profiles)
        _write_profile(profiles, name, replace(profiles.profiles.get(name, Profile()), server=value.rstrip("/")))
    except BadRequest as error:
        raise stop(error.detail, 2) from error


@group.command("unset")
def unset_value(key: KeyArgument, profile: ProfileName = None) -> None:
    """Remove a setting from the file."""
    try:
        profiles = read_profiles(config_file())
        if key is Key.PROFILE:
            write_profiles(config_file(), replace(profiles, current=None))
            return
        name, _ = choose_profile(profile, profiles)
        old_profile = profiles.profiles.get(name, Profile())
        _write_profile(
            profiles, name, replace(old_profile, token=None) if key is Key.TOKEN else replace(old_profile, server=None)
        )
    except BadRequest as error:
        raise stop(error.detail, 2) from error


def _write_profile(profiles: Profiles, name: str, profile: Profile) -> None:
    """Writes a profile. If its server changes, the token for the old server is removed."""
    old_profile = profiles.profiles.get(name, Profile())
    if profile.token is not None and profile.server != old_profile.server:
        profile = replace(profile, token=None)
        err.print(
            f"the token of profile {name} was for {old_profile.server} and is removed; "
            f"run `mobizo login --profile {name}`",
            markup=False,
            soft_wrap=True,
        )
    write_profiles(config_file(), profiles.with_profile(name, profile))
