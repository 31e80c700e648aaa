"""docs/dependencies.md lists exactly the versions that constraints.txt pins, each with the month of its release."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (\S+) \| (\d\S*) \| (\d{4}-\d{2}|-) \| (pinned|\S+, \d{4}-\d{2}) \|$", re.MULTILINE)


def test_every_pinned_version_is_listed_with_its_release():
    pins = re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = ROW.findall(page)
    assert [row[:2] for row in rows] == pins
    assert page.count("\n| ") == len(rows) + 1  # every row is complete, beside the table's head
    assert len(pins) > 100


def test_a_version_without_a_month_names_a_newer_one():
    rows = ROW.findall((ROOT / "docs" / "dependencies.md").read_text())
    assert [name for name, _, released, newest in rows if released == "-" and newest == "pinned"] == []
