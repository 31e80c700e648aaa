"""The report as Markdown, plots beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.drawing import in_words
from bench.result import Table, cell_text
from bench.sections import QUICK, TITLE, Section

PLOTS = "plots"  # the folder beside the page


def plot_file(section: str, plot: str) -> str:
    """A plot's path from the page."""
    return f"{PLOTS}/{section}-{re.sub(r'[^A-Za-z0-9_-]+', '-', plot)}.png"


def markdown_page(found: Sequence[Section], kind: str) -> str:
    """The whole page."""
    lines = [f"# {TITLE}", "", "Made by `python -m bench report` from the JSON files beside it.", ""]
    if kind == "quick":
        lines += [f"**{QUICK}**", ""]
    lines += [f"- [{section.name}](#{section.name})" + _mark(section) for section in found]
    for section in found:
        lines += ["", f"## {section.name}", "", _text(section.facts)]
        if section.result is not None:
            lines[-1] += f" [Result as JSON]({section.name}.json)."
        if section.run is not None and section.run.failure:
            lines += ["", f"**It failed.** {_text(section.run.failure)}"]
        for plot in section.plots:
            lines += ["", f"![{_text(in_words(plot))}]({plot_file(section.name, plot.name)})"]
        for table in section.tables:
            lines += ["", f"### {_text(table.title)}", "", *_table(table)]
            if table.notes:
                lines += ["", _text(table.notes)]
    return "\n".join(lines) + "\n"


def _mark(section: Section) -> str:
    return ": failed" if section.run is not None and section.run.failure else ""


def _table(table: Table) -> list[str]:
    numeric = [
        all(isinstance(row[place], int | float) or row[place] is None for row in table.rows)
        for place in range(len(table.columns))
    ]
    rules = ["---:" if right else "---" for right in numeric]
    rows = [[_text(cell_text(cell)) for cell in row] for row in table.rows]
    return ["| " + " | ".join(row) + " |" for row in ([_text(name) for name in table.columns], rules, *rows)]


def _text(text: str) -> str:
    """Text that Markdown neither reads as a column's end nor as markup."""
    one_line = " ".join(text.split())
    marked = re.sub(r"([\\`*\[\]|<>])", r"\\\1", one_line)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", marked)  # within a word it marks nothing up
