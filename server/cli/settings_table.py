"""`python -m server.cli.settings_table FILE`: writes the table of all settings into a Markdown file, between markers.

The table is generated from `Settings`, so it always matches the code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from server.settings import Settings

BEGIN, END = "<!-- settings: written by python -m server.cli.settings_table -->", "<!-- end of settings -->"


def table() -> str:
    """Returns a Markdown table with one row per setting, in the order of the class."""
    rows = ["| variable | default | what |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        value = field.get_default(call_default_factory=True)
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `MOBIZO_{name.upper()}` | {_formatted(value)} | {description} |")
    return "\n".join(rows)


def _formatted(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Path):
        return f"`{str(value).replace(str(Path.home()), '~', 1)}`"
    if isinstance(value, list):
        return f"`{' '.join(str(word).replace(sys.executable, 'python') for word in value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "none"


def with_table(document: str) -> str:
    """Returns a document with the table inserted between its markers."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m server.cli.settings_table FILE")
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
