"""`mobizo login`, `logout` and `whoami`: the token in a profile."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mobizo.cli.connect import Connect, ProfileName, Server, open_client, server_command
from mobizo.cli.console import Json, err, out, show, stop
from mobizo.cli.settings import DEFAULT_SERVER, choose_profile
from mobizo.profiles import Profile, config_file, read_profiles, write_profiles
from shared.access import WhoAmI
from shared.errors import BadRequest

commands = typer.Typer()


@commands.command()
def login(
    server: Server = None,
    profile: ProfileName = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the token from a file.", exists=True, dir_okay=False),
    ] = None,
    with_token: Annotated[bool, typer.Option("--with-token", help="Read the token from standard input.")] = False,
    as_json: Json = False,
) -> None:
    """Log in with a token, which is stored in a profile. You are asked for the token, and what you type is hidden.

    No option takes the token, because other users of this machine can see command lines.
    """
    if token_file is not None and with_token:
        raise stop("give one of --token-file and --with-token", 2)
    path = config_file()
    try:
        profiles = read_profiles(path)
        name, _ = choose_profile(profile, profiles)
    except BadRequest as error:
        raise stop(error.detail, 2) from error
    old_profile = profiles.profiles.get(name, Profile())
    interactive = sys.stdin.isatty()
    url = (server or os.environ.get("MOBIZO_SERVER") or _choose_server(old_profile, interactive)).rstrip("/")
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8-sig", errors="replace").strip()
    elif interactive:
        token = typer.prompt("Token", hide_input=True, err=True).strip()
    elif with_token:
        token = sys.stdin.read().strip()
    else:
        raise stop("standard input is not a terminal: give the token with --token-file or --with-token", 2)
    with open_client(url, token) as client:
        me = client.tokens.whoami()
    profiles = replace(profiles.with_profile(name, Profile(url, token)), current=profiles.current or name)
    write_profiles(path, profiles)
    facts = {"profile": name, "server": url, "file": str(path), "whoami": me.model_dump(mode="json")}
    show(as_json, facts, f"logged in to {url} as {_owner(me)}; profile {name} in {path}")
    if profiles.current != name:
        hint = f"use it with --profile {name}; `mobizo config use {name}` makes it the default"
        err.print(hint, markup=False, soft_wrap=True)
    for variable in ("MOBIZO_SERVER", "MOBIZO_TOKEN"):
        if os.environ.get(variable):
            err.print(f"{variable} is set and overrides the profile; unset it to use the profile", soft_wrap=True)


def _choose_server(old_profile: Profile, interactive: bool) -> str:
    if interactive:
        return str(typer.prompt("Server", default=old_profile.server or DEFAULT_SERVER, err=True))
    if old_profile.server is None:
        raise stop("no server: give --server or set MOBIZO_SERVER", 2)
    return old_profile.server


@commands.command()
def logout(profile: ProfileName = None) -> None:
    """Remove the token of a profile from this machine. The token itself stays valid until it expires or is revoked."""
    path = config_file()
    try:
        profiles = read_profiles(path)
        name, _ = choose_profile(profile, profiles)
    except BadRequest as error:
        raise stop(error.detail, 2) from error
    old_profile = profiles.profiles.get(name)
    if old_profile is None or old_profile.token is None:
        raise stop(f"profile {name} has no token; `mobizo config` shows the profile in use", 1)
    write_profiles(path, profiles.with_profile(name, replace(old_profile, token=None)))
    out.print(f"the token of profile {name} was removed; `mobizo token revoke ID` makes it invalid", soft_wrap=True)


@commands.command()
@server_command
def whoami(connect: Connect, as_json: Json = False) -> None:
    """Show the tenant, role, scopes and expiry of your token."""
    with connect() as client:
        me = client.tokens.whoami()
    expiry = "never" if me.expires_at is None else f"{me.expires_at:%Y-%m-%d %H:%M} UTC"
    show(as_json, me, f"{_owner(me)}\nscopes: {' '.join(me.scopes) or 'none'}\nexpires: {expiry}")


def _owner(me: WhoAmI) -> str:
    owner = f"user {me.user}" if me.user else f"token {me.name or me.token_id}"
    return f"{owner}, {me.role} of tenant {me.tenant}"
