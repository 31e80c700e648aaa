"""`python -m server.settings_table FILE`: writes the table of all settings into a Markdown file, between its marks.

The table is made of `Settings` itself, so that it cannot say something else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from server.settings import Settings

BEGIN, END = "<!-- settings: written by python -m server.settings_table -->", "<!-- end of settings -->"


def table() -> str:
    """Markdown: one row for each setting, in the order of the class."""
    rows = ["| variable | default | what |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        value = field.get_default(call_default_factory=True)
        told = (field.description or "").replace("|", "\\|")
        rows.append(f"| `MOBIZO_{name.upper()}` | {_shown(value)} | {told} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Path):
        return f"`{str(value).replace(str(Path.home()), '~', 1)}`"
    if isinstance(value, list):
        return f"`{' '.join(str(word).replace(sys.executable, 'python') for word in value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "none"


def written(document: str) -> str:
    """A document with the table between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
