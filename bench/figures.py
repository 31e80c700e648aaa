"""Figures in README and docs that come from a benchmark's result: each stands behind a marker that says where from.

`<!-- bench: step.gemm_share .0f x100 -->99 %`: the result's name, a claim, a format, and a factor if the unit differs.
A figure that is no claim is found in a row, by the columns that single it out:
`<!-- bench: server[database=sqlite,what=job to a device].p99_ms .0f -->125 ms`; of a list there, its median. What no
result holds yet reads "not measured". `python -m bench figures` writes all of them anew.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bench.result import Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MISSING = "not measured"
OPENING = "<!-- bench:"
MARKER = re.compile(
    r"<!-- bench: (?P<result>[\w-]+)(?:\[(?P<where>[^\]]+)\])?\.(?P<name>\w+)"
    r" (?P<format>\S+)(?: x(?P<factor>\S+))? -->"
    rf"(?P<shown>{MISSING}|[-+]?\d+(?:,\d{{3}})*(?:\.\d+)?)"
)
OWN_FILES = {"report.json"}  # what lies beside results and is none


class UnknownFigure(Exception):
    """A marker names what its result does not hold: correct the marker, or measure again."""


def results_in(directory: Path) -> dict[str, Result]:
    """Every result file of a directory, by benchmark."""
    files = sorted(path for path in directory.glob("*.json") if path.name not in OWN_FILES)
    return {path.stem: Result.model_validate_json(path.read_bytes()) for path in files}


def documents() -> list[Path]:
    """Where figures are quoted."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def figure(marker: re.Match[str], results: Mapping[str, Result]) -> str:
    """What ought to stand behind a marker. UnknownFigure: several rows fit, or what fits is no number."""
    result = results.get(marker["result"])
    value = None if result is None else _value(marker, result)
    return MISSING if value is None else format(value * float(marker["factor"] or 1), marker["format"])


def _value(marker: re.Match[str], result: Result) -> float | None:
    if marker["where"] is None:
        return result.claims.get(marker["name"])
    wanted = dict(pair.split("=", 1) for pair in marker["where"].split(","))
    found = [row for row in result.rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    values = [row[marker["name"]] for row in found if row.get(marker["name"]) is not None]
    if not values:
        return None
    numbers = values[0] if isinstance(values[0], list) else values
    if len(values) > 1 or not all(isinstance(number, int | float) for number in numbers):
        raise UnknownFigure(f"{marker[0]}: {len(values)} rows fit; one is needed, with a number or some")
    return float(statistics.median(numbers))


def refilled(text: str, results: Mapping[str, Result]) -> str:
    """A document with every marked figure as the results have it."""

    def anew(marker: re.Match[str]) -> str:
        return marker[0][: marker.start("shown") - marker.start()] + figure(marker, results)

    return MARKER.sub(anew, text)


def figures(
    check: Annotated[
        bool, typer.Option("--check", help="change nothing; fail if a figure is not the result's")
    ] = False,
    directory: Annotated[Path, typer.Option("--from", help="where the results lie")] = RESULTS,
) -> None:
    """Write the figures that README and docs quote anew from the results."""
    results = results_in(directory)
    stale = []
    for path in documents():
        text = path.read_text()
        right = refilled(text, results)
        if right != text:
            stale.append(path.name)
            if not check:
                path.write_text(right)
    if stale:
        print(("not as measured: " if check else "written: ") + ", ".join(stale))
    if check and stale:
        raise typer.Exit(1)
