"""Lists of a command: a table that fits the terminal, or tab-separated rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, TypeVar

import typer
from rich.cells import cell_len, set_cell_size

from mobizo.cli.console import err, out

MOST_ROWS = 100
LEAST_WIDTH = 10  # characters; a column is not cut to less

Limit = Annotated[int, typer.Option("--limit", "-L", min=1, help="Maximum number of rows.")]
Item = TypeVar("Item")


def newest(found: Iterable[Item], limit: int) -> list[Item]:
    """Returns the first `limit` items, and says on standard error if there are more. Fetches no further page."""
    items = list(islice(found, limit + 1))
    if len(items) > limit:
        err.print(f"the newest {limit} are shown; --limit {10 * limit} shows more", soft_wrap=True)
    return items[:limit]


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, drop: Sequence[str] = (), empty: str = ""
) -> None:
    """Prints rows: on a terminal with a header and aligned, elsewhere tab-separated, whole and without a header.

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
    shown = list(range(len(columns)))
    for name in drop:
        if _width(widths, shown) <= out.width:
            break
        shown.remove(columns.index(name))
    # The first column names the row: it is copied into other commands and is never cut.
    while (excess := _width(widths, shown) - out.width) > 0 and len(shown) > 1:
        widest = max(shown[1:], key=lambda place: widths[place])
        if widths[widest] <= LEAST_WIDTH:
            break
        widths[widest] = max(LEAST_WIDTH, widths[widest] - excess)
    for number, texts in enumerate([columns, *cells]):
        line = "  ".join(_fitted(texts[place], widths[place]) for place in shown)
        out.print(line.rstrip(), style="" if number else "bold", markup=False, soft_wrap=True)
    if hidden := [name for place, name in enumerate(columns) if place not in shown]:
        err.print(f"not shown: {', '.join(hidden)}; use a wider terminal or --json", style="dim", soft_wrap=True)


def _width(widths: Sequence[int], shown: Sequence[int]) -> int:
    """Returns the characters of a line with these columns and two spaces between them."""
    return sum(widths[place] for place in shown) + 2 * (len(shown) - 1)


def _fitted(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _printable(cell: str) -> str:
    return "".join(letter if letter.isprintable() else " " if letter in "\t\n\r" else "?" for letter in cell)
