"""Shared code of the commands that use a home: opening it, and printing text, tables or JSON."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from server.database.database import Database
from server.database.schema import prepare
from server.identity.signing_keys import service as keys
from server.identity.signing_keys.service import prepare_keys
from server.settings import Settings
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.protocol import DeviceApproval

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Tenant = Annotated[str, typer.Option(help="name of the tenant")]
output = Console(highlight=False, soft_wrap=True)
complaints = Console(stderr=True, highlight=False, soft_wrap=True)


def open_home() -> tuple[Settings, Database]:
    """Opens a home created by `init`. Returns its settings and its database, with the schema up to date."""
    settings = Settings()
    keys.load_key(settings.key_path)
    database = Database(settings.url, settings.tuning)
    prepare(database.engine, settings.migrate_at_start)
    prepare_keys(database, settings)
    return settings, database


def checked_users(names: list[str]) -> list[str]:
    """Returns names of users. Raises BadRequest for one that no job can have, or too many."""
    try:
        return DeviceApproval(users=names).users
    except ValidationError as error:
        raise BadRequest(f"user: {first_invalid(error).message}") from error


def moment(value: datetime | None) -> str | None:
    """Formats a time as ISO 8601 with a resolution of one second."""
    return None if value is None else value.isoformat(timespec="seconds")


def tell(as_json: bool, value: Any, text: str) -> None:
    """Prints `value` as JSON, or `text`."""
    output.print(json.dumps(value) if as_json else text, markup=False)


def tell_rows(as_json: bool, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Prints rows as JSON, or as a table."""
    if as_json:
        output.print(json.dumps(rows), markup=False)
        return
    table = Table()
    for column in columns:
        if column in ("id", "recipe_id"):
            # No line breaks: users copy identifiers into other commands.
            table.add_column(column, no_wrap=True, overflow="ignore")
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    output.print(table)
