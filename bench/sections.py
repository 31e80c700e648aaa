"""What the report's pages say, before it is Markdown or HTML: one section a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ConfigDict

from bench.result import Cell, Plot, Result, Row, Table

TITLE = "Benchmarks"
QUICK = (
    "A quick run: few steps, seeds and repetitions. It shows that every benchmark works, and orders of magnitude; "
    "quote figures of a plain run."
)


class Run(BaseModel):
    """How a benchmark's process went."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    core_seconds: float  # of it and what it started and waited for
    limit_seconds: int
    failure: str = ""  # why there is no result, in its own last words


class Runs(BaseModel):
    """What a report ran, kept beside the results as report.json."""

    kind: str  # quick, plain or full
    runs: dict[str, Run] = {}


@dataclass(frozen=True)
class Section:
    """One benchmark on the pages: what it found, how its run went, or both."""

    name: str
    result: Result | None
    run: Run | None = None

    @property
    def tables(self) -> list[Table]:
        """The benchmark's own tables; its rows where it has none; and its claims."""
        if self.result is None:
            return []
        own = self.result.tables or tables_of_rows(self.result.rows)
        return [*own, claims_table(self.result.claims)] if self.result.claims else list(own)

    @property
    def plots(self) -> list[Plot]:
        """The benchmark's plots."""
        return self.result.plots if self.result else []

    @property
    def facts(self) -> str:
        """Where and from what it was measured, in a line."""
        if self.result is None:
            return "No result."
        machine = self.result.machine
        said = [
            f"Commit {self.result.commit}",
            f"{machine.get('cores')} cores of {machine.get('cpu')}",
            f"{machine.get('memory_bytes', 0) / 2**30:.1f} GiB",
            *(str(machine[key]) for key in ("gpu", "system") if machine.get(key)),
            f"Python {machine.get('python')}",
        ]
        return ", ".join(said) + "." + (f" {duration(self.run)}" if self.run else "")


def duration(run: Run) -> str:
    """How long a run took."""
    return f"Ran {run.seconds:,.0f} s ({run.core_seconds:,.0f} core-seconds; limit {run.limit_seconds:,} s)."


def sections(results: Mapping[str, Result], order: list[str], runs: Mapping[str, Run]) -> list[Section]:
    """One for every result and every run, in `order`, then by name."""
    names = {*results, *runs}
    placed = [name for name in order if name in names]
    return [Section(name, results.get(name), runs.get(name)) for name in placed + sorted(names - set(placed))]


def claims_table(claims: Mapping[str, float]) -> Table:
    """The claims of a result, by which docs and tests name its figures."""
    return Table(name="claims", title="Claims", columns=("claim", "value"), rows=tuple(claims.items()))


def tables_of_rows(rows: list[Row]) -> list[Table]:
    """Rows of one kind after another (the same part, the same columns) as a table each."""
    found = []
    kinds = groupby(rows, key=lambda row: (row.get("part"), tuple(row)))
    for number, ((part, columns), kind) in enumerate(kinds, 1):
        title = "Measured" + (f": {part}" if part else "")
        cells = tuple(tuple(as_cell(row[column]) for column in columns) for row in kind)
        found.append(Table(name=f"rows-{number}", title=title, columns=columns, rows=cells))
    return found


def as_cell(value: Any) -> Cell:
    """A row's value, nested ones as JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
