"""`mobizo`'s commands about whoever asks, and the tokens that an operator makes for others."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Table

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop, whole
from shared.access import Role, Scope, TokenRequest

tokens = typer.Typer(help="Tokens of the tenant's people and services (operator).", no_args_is_help=True)


def whoami(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show whose token this is, and what it may do."""
    with connected(server, token) as client:
        me = client.whoami()
    if as_json:
        print_json(me)
        return
    owner = f"user {me.user}" if me.user else f"token {me.name or me.token_id}"
    out.print(f"{owner}, {me.role} of tenant {me.tenant}", markup=False)
    out.print(f"may: {' '.join(me.scopes) or 'nothing'}", markup=False)
    out.print(f"until: {_day(me.expires_at)}")


def _day(moment: datetime | None) -> str:
    return "it is revoked" if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="for you to tell tokens apart")] = "",
    role: Annotated[Role, typer.Option(help="operator or app")] = Role.APP,
    scope: Annotated[list[Scope] | None, typer.Option(help="what it may do; repeatable; default: the role's")] = None,
    user: Annotated[str | None, typer.Option(help="whose it is; default: as your own token")] = None,
    expires_in_days: Annotated[str | None, typer.Option(help="a number, or `never`; default: the server's")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make a token that may do no more than yours; it is shown this once."""
    days = int(expires_in_days) if expires_in_days and expires_in_days.isdecimal() else expires_in_days
    fields = {"name": name, "role": role, "scopes": scope or None, "user": user, "expires_in_days": days}
    try:
        request = TokenRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise stop(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}", 2) from error
    with connected(server, token) as client:
        made = client.make_token(request)
    print_json(made) if as_json else out.print(made.token, soft_wrap=True)


@tokens.command("list")
def list_tokens(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List tokens, newest first; what they are is not kept."""
    with connected(server, token) as client:
        found = list(client.tokens())
    if as_json:
        print_json(list[BaseModel](found))
        return
    table = Table(whole("id"), "name", "role", "user", "ends", "last used")
    for item in found:
        ends = "revoked" if item.revoked_at else "never" if item.expires_at is None else f"{item.expires_at:%Y-%m-%d}"
        used = "" if item.last_used_at is None else f"{item.last_used_at:%Y-%m-%d %H:%M}"
        table.add_row(item.id, item.name, item.role, item.user, ends, used)
    out.print(table)


@tokens.command("revoke")
def revoke_token(token_id: str, server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """End a token at once."""
    with connected(server, token) as client:
        client.revoke_token(token_id)
    out.print(f"{token_id} is revoked")
