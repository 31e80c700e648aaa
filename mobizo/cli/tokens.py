"""`mobizo token`: API tokens of people and services."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, out, show, stop
from mobizo.cli.tables import MAX_ROWS, Limit, print_items, take_newest
from shared.access import Role, Scope, TokenRequest
from shared.invalid_fields import first_invalid

group = typer.Typer(help="Create, list and revoke API tokens (operator).", no_args_is_help=True)
TokenId = Annotated[str, typer.Argument(metavar="ID", help="Id of the token, as `mobizo token list` shows it.")]


@group.command("create")
@server_command
def create_token(
    connect: Connect,
    name: Annotated[str, typer.Option(help="Name that tells the token apart from others.")] = "",
    role: Annotated[Role, typer.Option(help="Operator or app.")] = Role.APP,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Scope of the token; repeatable. Default: all scopes of the role.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="User whom the token belongs to. Default: the owner of your token.")
    ] = None,
    expires_in_days: Annotated[
        str | None, typer.Option(help="Number of days, or `never`. Default: the server's setting.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token with at most the scopes of yours. It is shown only once."""
    days = int(expires_in_days) if expires_in_days and expires_in_days.isdecimal() else expires_in_days
    fields = {"name": name, "role": role, "scopes": scope or None, "user": user, "expires_in_days": days}
    try:
        request = TokenRequest.model_validate(fields)
    except ValidationError as error:
        first = first_invalid(error)
        raise stop(f"--{str(first.location[0]).replace('_', '-')}: {first.message}", 2) from error
    with connect() as client:
        grant = client.tokens.create(request)
    show(as_json, grant, grant.token)


@group.command("list")
@server_command
def list_tokens(connect: Connect, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List tokens, newest first, without their secret text."""
    with connect() as client:
        tokens = take_newest(client.tokens.list(), limit)
    rows = []
    for item in tokens:
        expiry = "revoked" if item.revoked_at else "never" if item.expires_at is None else f"{item.expires_at:%Y-%m-%d}"
        last_used = "" if item.last_used_at is None else f"{item.last_used_at:%Y-%m-%d %H:%M}"
        rows.append((item.id, item.name, item.role, item.user or "", expiry, last_used))
    print_items(as_json, tokens, ("id", "name", "role", "user", "expires", "last used"), rows)


@group.command("revoke")
@server_command
def revoke_token(connect: Connect, token_id: TokenId) -> None:
    """Revoke a token with immediate effect."""
    with connect("mobizo token list") as client:
        client.tokens.revoke(token_id)
    out.print(f"{token_id} is revoked")
