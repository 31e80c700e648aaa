"""Lists of a command: a table that fits the terminal, or tab-separated rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mobizo.cli.console import err, out, print_json

MAX_ROWS = 100

Limit = Annotated[int, typer.Option("--limit", "-L", min=1, help="Maximum number of rows.")]
Item = TypeVar("Item")


def take_newest(items: Iterable[Item], limit: int) -> list[Item]:
    """Returns the first `limit` items; notes on standard error if there are more. Fetches no further page."""
    rows = list(islice(items, limit + 1))
    if len(rows) > limit:
        err.print(f"the newest {limit} are shown; --limit {10 * limit} shows more", soft_wrap=True)
    return rows[:limit]


def print_items(
    as_json: bool, items: Sequence[BaseModel], columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = ""
) -> None:
    """Prints items as JSON, or their rows as `print_table` does."""
    print_json([*items]) if as_json else print_table(columns, rows, empty=empty)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "") -> None:
    """Prints rows: a table with a header on a terminal; elsewhere tab-separated lines, uncut and without a header.

    empty: what a terminal shows on standard error instead of a table without rows. Characters that do not print are
    replaced by `?`.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not out.is_terminal:
        for row in cells:
            typer.echo("\t".join(row))
        return
    if not cells:
        err.print(empty or "none", markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    # The first column names the row: it is copied into other commands and is never wrapped.
    table.add_column(columns[0], no_wrap=True, min_width=max(cell_len(row[0]) for row in cells))
    for name in columns[1:]:
        table.add_column(name, overflow="fold", min_width=len(name))
    for row in cells:
        table.add_row(*map(Text, row))
    out.print(table)


def printable(cell: str) -> str:
    """Returns a text in which control characters, which a device may have sent, are replaced by `?`."""
    return "".join(letter if letter.isprintable() else " " if letter in "\t\n\r" else "?" for letter in cell)
