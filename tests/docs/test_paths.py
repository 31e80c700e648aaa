"""Files that README and docs name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(
    r"`((?:server|device_agent|shared|mobizo|simulation|bench|examples|deploy|tests)/[\w./-]+\.\w+)(?:::\w+)?`"
)
PLACEHOLDERS = {"bench/results/NAME.json", "server/lorax_server/utils/sources/hub.py"}  # the second is LoRAX's own
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    missing = [
        name for name in PATH.findall(page.read_text()) if name not in PLACEHOLDERS and not (ROOT / name).exists()
    ]
    assert not missing
