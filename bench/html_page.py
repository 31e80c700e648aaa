"""The report as one HTML file that stands alone: no scripts, its plots inside; for phones, in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from bench.drawing import in_words
from bench.markdown_page import plot_file
from bench.result import Cell, Table, cell_text
from bench.sections import QUICK, TITLE, Section

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae0; --soft: #f4f6f8; --link: #0b5cad;
  --alarm: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #15181c; --line: #3a4048; --soft: #1e2329;
  --link: #7fb6ff; --alarm: #ff8a80; } }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
a { color: var(--link); }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav ul { padding-left: 1.2rem; } nav ul ul { font-size: .9em; }
.facts, .notes { font-size: .9em; overflow-wrap: anywhere; }
.failed { color: var(--alarm); overflow-wrap: anywhere; white-space: pre-wrap; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
td { min-width: 4rem; }
th { background: var(--soft); } td.number { text-align: right; white-space: nowrap; }
img { max-width: 100%; height: auto; border-radius: .4rem; background: #fff; }
"""


def html_page(found: Sequence[Section], kind: str, pictures: Mapping[str, bytes]) -> str:
    """The whole page. pictures: each plot's PNG by `plot_file`."""
    quick = f"<p><strong>{escape(QUICK)}</strong></p>\n" if kind == "quick" else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>mobizo: {TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>\n"
        f"<p>Made by <code>python -m bench report</code> from the JSON files beside it.</p>\n{quick}"
        f'<nav aria-label="Contents">\n<ul>\n{"".join(map(_entry, found))}</ul>\n</nav>\n<main>\n'
        + "".join(_section(section, pictures) for section in found)
        + "</main>\n</body>\n</html>\n"
    )


def _place(section: Section, table: Table) -> str:
    return f"{section.name}--{table.name}".replace(" ", "-")


def _entry(section: Section) -> str:
    below = "".join(
        f'<li><a href="#{escape(_place(section, table))}">{escape(table.title)}</a></li>' for table in section.tables
    )
    failed = ' <span class="failed">failed</span>' if section.run is not None and section.run.failure else ""
    listed = f"<ul>{below}</ul>" if below else ""
    return f'<li><a href="#{escape(section.name)}">{escape(section.name)}</a>{failed}{listed}</li>\n'


def _section(section: Section, pictures: Mapping[str, bytes]) -> str:
    link = f' <a href="{escape(section.name)}.json">Result as JSON</a>.' if section.result is not None else ""
    parts = [
        f'<section id="{escape(section.name)}">\n<h2>{escape(section.name)}</h2>\n'
        f'<p class="facts">{escape(section.facts)}{link}</p>\n'
    ]
    if section.run is not None and section.run.failure:
        parts.append(f'<p class="failed"><strong>It failed.</strong> {escape(section.run.failure)}</p>\n')
    for plot in section.plots:
        data = base64.b64encode(pictures[plot_file(section.name, plot.name)]).decode()
        parts.append(f'<p><img src="data:image/png;base64,{data}" alt="{escape(in_words(plot))}"></p>\n')
    parts += [_table(section, table) for table in section.tables]
    return "".join(parts) + "</section>\n"


def _table(section: Section, table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    notes = f'<p class="notes">{escape(table.notes)}</p>\n' if table.notes else ""
    title = escape(table.title)
    # What scrolls can be reached by the keyboard, and says what it is.
    return (
        f'<h3 id="{escape(_place(section, table))}">{title}</h3>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">\n'
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n{notes}"
    )


def _cell(cell: Cell) -> str:
    number = ' class="number"' if isinstance(cell, int | float) else ""
    return f"<td{number}>{escape(cell_text(cell))}</td>"
