"""Figures that README and docs quote from benchmark results. A marker names each source.

`<!-- bench: step.gemm_share .0f x100 -->99 %`: result, claim, format, and a factor if the unit differs. A figure
that is not a claim comes from the one row that matches some columns; for a list, the median is quoted:
`<!-- bench: server[database=sqlite,what=job to a device].p99_ms .0f -->125 ms`. Without a value the document reads "not
measured". `python -m bench figures` updates all figures.
"""

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bench.result import Result, results_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MISSING = "not measured"
OPENING = "<!-- bench:"
MARKER = re.compile(
    r"<!-- bench: (?P<result>[\w-]+)(?:\[(?P<where>[^\]]+)\])?\.(?P<name>\w+)"
    r" (?P<format>\S+)(?: x(?P<factor>\S+))? -->"
    rf"(?P<shown>{MISSING}|[-+]?\d+(?:,\d{{3}})*(?:\.\d+)?)"
)


class UnknownFigure(Exception):
    """A marker names a value that its result does not contain: correct the marker, or measure again."""


def documents() -> list[Path]:
    """Returns the documents that quote figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def figure(marker: re.Match[str], results: Mapping[str, Result]) -> str:
    """Returns the text after a marker. Raises UnknownFigure unless exactly one row matches."""
    result = results.get(marker["result"])
    value = None if result is None else _value(marker, result)
    return MISSING if value is None else format(value * float(marker["factor"] or 1), marker["format"])


def _value(marker: re.Match[str], result: Result) -> float | None:
    if marker["where"] is None:
        return result.claims.get(marker["name"])
    conditions = dict(pair.split("=", 1) for pair in marker["where"].split(","))
    matches = [row for row in result.rows if all(str(row.get(key)) == value for key, value in conditions.items())]
    values = [row[marker["name"]] for row in matches if row.get(marker["name"]) is not None]
    if not values:
        return None
    numbers = values[0] if isinstance(values[0], list) else values
    if len(values) > 1 or not all(isinstance(number, int | float) for number in numbers):
        raise UnknownFigure(
            f"{marker[0]}: {len(values)} rows match; exactly one must match, with a number or a list of numbers"
        )
    return float(statistics.median(numbers))


def update_figures(text: str, results: Mapping[str, Result]) -> str:
    """Returns a document with every marked figure updated from the results."""

    def replacement(marker: re.Match[str]) -> str:
        return marker[0][: marker.start("shown") - marker.start()] + figure(marker, results)

    return MARKER.sub(replacement, text)


def figures(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail if a figure differs from its result.")
    ] = False,
    directory: Annotated[Path, typer.Option("--from", help="The directory of the results.")] = RESULTS,
) -> None:
    """Update the figures that README and docs quote from the results."""
    results = results_in(directory)
    stale = []
    for path in documents():
        text = path.read_text()
        new_text = update_figures(text, results)
        if new_text != text:
            stale.append(path.name)
            if not check:
                path.write_text(new_text)
    if stale:
        print(("not up to date: " if check else "written: ") + ", ".join(stale))
    if check and stale:
        raise typer.Exit(1)
