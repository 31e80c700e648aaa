"""Figures that README and docs quote from benchmark results. A marker names each source.

`<!-- bench: step.gemm_share .0f x100 -->99 %`: result, claim, format, and a factor if the unit differs. A figure
that is not a claim comes from the one row that matches some columns; for a list, the median is quoted:
`<!-- bench: server[database=sqlite,what=job to a device].p99_ms .0f -->125 ms`. Without a value the document reads "not
measured". `python -m bench figures` updates all figures, and removes from the results the rows that no document quotes.
"""

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.result import Result, Row, results_in

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
    values = [row[marker["name"]] for row in _matching_rows(marker, result)]
    if not values:
        return None
    numbers = values[0] if isinstance(values[0], list) else values
    if len(values) > 1 or not all(isinstance(number, int | float) for number in numbers):
        raise UnknownFigure(
            f"{marker[0]}: {len(values)} rows match; exactly one must match, with a number or a list of numbers"
        )
    return float(statistics.median(numbers))


def _matching_rows(marker: re.Match[str], result: Result) -> list[Row]:
    """Returns the rows that meet the conditions of a marker and have its column."""
    conditions = dict(pair.split("=", 1) for pair in marker["where"].split(","))
    return [
        row
        for row in result.rows
        if row.get(marker["name"]) is not None and all(str(row.get(key)) == value for key, value in conditions.items())
    ]


def quoted_rows(name: str, result: Result, texts: Iterable[str]) -> list[Row]:
    """Returns the rows of the result `name` that some text quotes, in their order."""
    markers = [marker for text in texts for marker in MARKER.finditer(text)]
    quoted = [
        row
        for marker in markers
        if marker["result"] == name and marker["where"] is not None
        for row in _matching_rows(marker, result)
    ]
    return [row for row in result.rows if row in quoted]


def update_figures(text: str, results: Mapping[str, Result]) -> str:
    """Returns a document with every marked figure updated from the results."""

    def replacement(marker: re.Match[str]) -> str:
        return marker[0][: marker.start("shown") - marker.start()] + figure(marker, results)

    return MARKER.sub(replacement, text)


def figures() -> None:
    """Update the figures that README and docs quote, and remove rows of results that they do not quote."""
    results = results_in(RESULTS)
    new_texts = {path: update_figures(path.read_text(), results) for path in documents()}
    for name, result in results.items():
        rows = quoted_rows(name, result, new_texts.values())
        new_texts[RESULTS / f"{name}.json"] = result.model_copy(update={"rows": rows}).text()
    stale = {path: text for path, text in new_texts.items() if text != path.read_text()}
    for path, text in stale.items():
        path.write_text(text)
    if stale:
        print("written: " + ", ".join(path.name for path in stale))
