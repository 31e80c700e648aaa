"""docs/security.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_promise_names_a_test_that_exists():
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(tests) > 20
    missing = [f"{path}::{name}" for path, name in tests if f"\ndef {name}(" not in (ROOT / path).read_text()]
    assert missing == []
