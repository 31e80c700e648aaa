"""Shared code of the commands: opening a home, and printing text, tables or JSON. Imports no database by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from server.database.database import Database
    from server.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[str, typer.Option(help="Name of the tenant.")]
output = Console(highlight=False, soft_wrap=True)
complaints = Console(stderr=True, highlight=False, soft_wrap=True)


def open_home() -> tuple[Settings, Database]:
    """Opens a home created by `init`. Returns its settings and its database, with the schema up to date."""
    from server.database.database import Database
    from server.identity.signing_keys.service import load_key, prepare_keys
    from server.schema import prepare
    from server.settings import Settings

    settings = Settings()
    load_key(settings.key_path)
    database = Database(settings.url, settings.tuning)
    prepare(database.engine, settings.migrate_at_start)
    prepare_keys(database, settings)
    return settings, database


@contextmanager
def transaction(*, writing: bool = False) -> Iterator[Session]:
    """Opens a home created by `init`, and a transaction in its database."""
    _, database = open_home()
    try:
        with database.writing() if writing else database.reading() as session:
            yield session
    finally:
        database.close()


def rows_of(objects: Iterable[object], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns the attributes named like the columns of each object, with times as text."""
    return [{column: _cell(getattr(each, column)) for column in columns} for each in objects]


def _cell(value: Any) -> Any:
    return moment(value) if isinstance(value, datetime) else value


def moment(value: datetime | None) -> str | None:
    """Formats a time as ISO 8601 with a resolution of one second."""
    return None if value is None else value.isoformat(timespec="seconds")


def tell(as_json: bool, value: Any, text: str) -> None:
    """Prints `value` as JSON, or `text`."""
    output.print(json.dumps(value) if as_json else text, markup=False)


def tell_figures(as_json: bool, figures: dict[str, Any]) -> None:
    """Prints figures as JSON, or each on a line."""
    lines = [f"{name}: {value:,}" if type(value) is int else f"{name}: {value}" for name, value in figures.items()]
    tell(as_json, figures, "\n".join(lines))


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
