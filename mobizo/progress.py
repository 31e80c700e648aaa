"""Bars of a download on a terminal; nothing where there is none. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from mobizo.pulling import Progress as Tell


@contextmanager
def bars(console: Console) -> Iterator[Tell | None]:
    """What to tell of each file's bytes while the context lasts; each file has a bar of its own."""
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(24), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as shown:
        lines: dict[str, TaskID] = {}

        def tell(name: str, have: int, size: int) -> None:
            if name not in lines:
                lines[name] = shown.add_task(name, total=size)
            shown.update(lines[name], completed=have)

        yield tell
