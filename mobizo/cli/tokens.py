"""`mobizo whoami` and `mobizo token`: API tokens of people and services."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Table

from mobizo.cli.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop, unwrapped
from shared.access import Role, Scope, TokenRequest

commands = typer.Typer()
group = typer.Typer(help="Create, list and revoke API tokens (operator).", no_args_is_help=True)


@commands.command()
def whoami(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show the tenant, role, scopes and expiry of your token."""
    with connected(server, token) as client:
        me = client.tokens.whoami()
    if as_json:
        print_json(me)
        return
    owner = f"user {me.user}" if me.user else f"token {me.name or me.token_id}"
    out.print(f"{owner}, {me.role} of tenant {me.tenant}", markup=False)
    out.print(f"scopes: {' '.join(me.scopes) or 'none'}", markup=False)
    out.print(f"expires: {_minute(me.expires_at)}")


def _minute(moment: datetime | None) -> str:
    return "never" if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"


@group.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="Name that tells the token apart from others.")] = "",
    role: Annotated[Role, typer.Option(help="operator or app.")] = Role.APP,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Scope of the token; repeatable. Default: all scopes of the role.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="User whom the token belongs to. Default: the owner of your token.")
    ] = None,
    expires_in_days: Annotated[
        str | None, typer.Option(help="Number of days, or `never`. Default: the server's setting.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Create a token with at most the scopes of yours. It is shown only once."""
    days = int(expires_in_days) if expires_in_days and expires_in_days.isdecimal() else expires_in_days
    fields = {"name": name, "role": role, "scopes": scope or None, "user": user, "expires_in_days": days}
    try:
        request = TokenRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise stop(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}", 2) from error
    with connected(server, token) as client:
        created = client.tokens.create(request)
    print_json(created) if as_json else out.print(created.token, soft_wrap=True)


@group.command("list")
def list_tokens(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List tokens, newest first, without their secret text."""
    with connected(server, token) as client:
        found = list(client.tokens.list())
    if as_json:
        print_json(list[BaseModel](found))
        return
    table = Table(unwrapped("id"), "name", "role", "user", "expires", "last used")
    for item in found:
        ends = "revoked" if item.revoked_at else "never" if item.expires_at is None else f"{item.expires_at:%Y-%m-%d}"
        used = "" if item.last_used_at is None else f"{item.last_used_at:%Y-%m-%d %H:%M}"
        table.add_row(item.id, item.name, item.role, item.user, ends, used)
    out.print(table)


@group.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, as `mobizo token list` shows it.")],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
) -> None:
    """Revoke a token with immediate effect."""
    with connected(server, token) as client:
        client.tokens.revoke(token_id)
    out.print(f"{token_id} is revoked")
