"""The form of every benchmark's result: machine, commit, rows, named claims, and tables and plots for people.

One JSON file a benchmark; `bench report` makes its pages from these files alone.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float | None
Row = dict[str, Any]


class Table(BaseModel):
    """What was measured, as a person reads it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # unique within its benchmark; part of a file name
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: str = ""  # settings, and what would mislead without being said


class Plot(BaseModel):
    """The same as lines or bars. series: points (x, y) by name; of bars, x counts the groups in `groups`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    x: str
    y: str
    series: dict[str, tuple[tuple[float, float], ...]]
    kind: Literal["lines", "bars"] = "lines"
    groups: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False


class Result(BaseModel):
    """What one run of one benchmark found."""

    machine: dict[str, Any]
    commit: str
    rows: list[Row]
    claims: dict[str, float]
    tables: list[Table] = []
    plots: list[Plot] = []


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit measured, with `+` if the tree differs from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(
    path: Path | None,
    rows: list[Row],
    claims: dict[str, float],
    tables: Sequence[Table] = (),
    plots: Sequence[Plot] = (),
) -> None:
    """Prints rows and claims, tables on standard error for people, and writes all of it to `path` as JSON."""
    found = Result(
        machine=machine(), commit=commit(), rows=rows, claims=claims, tables=list(tables), plots=list(plots)
    ).model_dump(mode="json", exclude_defaults=True)
    console = Console(stderr=True)
    for table in tables:
        console.print(as_rich(table))
    print(json.dumps({key: value for key, value in found.items() if key not in ("tables", "plots")}, indent=2))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")


def as_rich(table: Table) -> RichTable:
    """For a terminal."""
    shown = RichTable(*table.columns, title=table.title, caption=table.notes or None)
    for row in table.rows:
        shown.add_row(*map(cell_text, row))
    return shown


def cell_text(cell: Cell) -> str:
    """A cell as it is shown: numbers in three significant digits or whole, nothing as a dash."""
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
