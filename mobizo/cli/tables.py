"""Lists of a command: a table that fits the terminal, or tab-separated rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, TypeVar

import typer
from rich.cells import cell_len, set_cell_size

from mobizo.cli.console import err, out

MAX_ROWS = 100
MIN_WIDTH = 10  # characters; a column is not cut to less

Limit = Annotated[int, typer.Option("--limit", "-L", min=1, help="Maximum number of rows.")]
Item = TypeVar("Item")


def take_newest(items: Iterable[Item], limit: int) -> list[Item]:
    """Returns the first `limit` items; notes on standard error if there are more. Fetches no further page."""
    rows = list(islice(items, limit + 1))
    if len(rows) > limit:
        err.print(f"the newest {limit} are shown; --limit {10 * limit} shows more", soft_wrap=True)
    return rows[:limit]


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, drop: Sequence[str] = (), empty: str = ""
) -> None:
    """Prints rows: aligned with a header on a terminal; elsewhere tab-separated, uncut and without a header.

    drop: columns that a narrow terminal does not show, the least important first. empty: what a terminal shows on
    standard error instead of a table without rows. Characters that do not print are replaced by `?`.
    """
    cells = [[_printable(cell) for cell in row] for row in rows]
    if not out.is_terminal:
        for row in cells:
            typer.echo("\t".join(row))
        return
    if not cells:
        err.print(empty or "none", markup=False, soft_wrap=True)
        return
    widths = [max(cell_len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    visible = list(range(len(columns)))
    for name in drop:
        if _width(widths, visible) <= out.width:
            break
        visible.remove(columns.index(name))
    # The first column names the row: it is copied into other commands and is never cut.
    while (excess := _width(widths, visible) - out.width) > 0 and len(visible) > 1:
        widest = max(visible[1:], key=lambda index: widths[index])
        if widths[widest] <= MIN_WIDTH:
            break
        widths[widest] = max(MIN_WIDTH, widths[widest] - excess)
    for number, texts in enumerate([columns, *cells]):
        line = "  ".join(_fit(texts[index], widths[index]) for index in visible)
        out.print(line.rstrip(), style="" if number else "bold", markup=False, soft_wrap=True)
    if hidden := [name for index, name in enumerate(columns) if index not in visible]:
        err.print(f"not shown: {', '.join(hidden)}; use a wider terminal or --json", style="dim", soft_wrap=True)


def _width(widths: Sequence[int], visible: Sequence[int]) -> int:
    """Returns the characters of a line with these columns and two spaces between them."""
    return sum(widths[index] for index in visible) + 2 * (len(visible) - 1)


def _fit(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _printable(cell: str) -> str:
    return "".join(letter if letter.isprintable() else " " if letter in "\t\n\r" else "?" for letter in cell)
