"""docs/own-data.md, run as it stands: its files are written as it shows them, and its commands run in its order."""

import json
import mailbox
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from device_agent.cli.app import app
from device_agent.datasets.build import MAX_RECORD_BYTES
from device_agent.datasets.formats import Format
from device_agent.datasets.store import DatasetStore

PAGE = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def write_files(directory):
    examples = dict(BLOCKS)
    rows = [f"{number},Ticket {number},{number % 2}\n" for number in range(100)]
    (directory / "tickets.csv").write_text(examples["csv"] + "".join(rows))
    (directory / "newer.csv").write_text(examples["csv"].splitlines(keepends=True)[0] + "200,Newer,1\n")
    (directory / "task.json").write_text(examples["json"])
    (directory / "style.json").write_text(re.search(r'`(\{"name": "style", .*?\})`', PAGE)[1])
    pairs = ({"prompt": f"Ticket {number}", "chosen": " Thanks.", "rejected": " No."} for number in range(60))
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for name in ("urgent", "other"):
        box = mailbox.mbox(directory / f"{name}.mbox")
        for number in range(50):
            box.add(f"Subject: {name}\nFrom: ana@example.org\n\nMessage {number}\n")
        box.close()


def test_commands_run_as_they_stand(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOBIZO_AGENT_HOME", str(tmp_path / "home"))
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "mobizo-agent"
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)
    store = DatasetStore(tmp_path / "home" / "data")
    assert list(store.directories()) == ["style", "tickets"]
    assert sum(store.about("tickets").records.values()) == 103


@pytest.mark.parametrize("form", Format)
def test_every_format_is_described(form):
    assert re.search(rf"^\| `{form}`", PAGE, re.MULTILINE)


def test_the_limit_of_a_record():
    assert f"more than {MAX_RECORD_BYTES:,} bytes" in re.sub(r"\s+", " ", PAGE)
