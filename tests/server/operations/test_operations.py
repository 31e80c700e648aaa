"""docs/operations.md: the commands and the metrics of which it speaks are there."""

import re
from pathlib import Path

import typer

from server.cli import main as cli
from server.operations.metrics.exposition import Exposition
from server.settings import Settings

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()


def options(command):
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_every_command_and_option_exists():
    root = typer.main.get_command(cli.app)
    for name, sub, rest in re.findall(r"mobizo-server ([a-z-]+)(?: ([a-z-]+))?([^`\n|]*)", TEXT):
        command = root.get_command(None, name)
        if hasattr(command, "commands"):
            command = command.get_command(None, sub)
        assert command is not None, f"mobizo-server {name} {sub}"
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest.split(" && ")[0].split("#")[0]):
            assert option in options(command), f"mobizo-server {name} {sub} {option}"


def test_every_setting_exists():
    fields = {f"MOBIZO_{name}".upper() for name in Settings.model_fields}
    elsewhere = {"MOBIZO_NAME", "MOBIZO_SECRETS", "MOBIZO_MODELS"}
    assert {name.removesuffix("_FILE") for name in re.findall(r"MOBIZO_[A-Z_]+", TEXT)} <= fields | elsewhere


def test_every_metric_exists(fleet, standing):
    state = standing[0].state.mobizo
    told = Exposition(state.meters, state.database).text().decode()
    names = set(re.findall(r"^# TYPE (\S+)", told, re.MULTILINE))
    spoken = set(re.findall(r"`((?:mobizo|process)_[a-z_]+)", TEXT)) - {"process_"}
    assert len(spoken) > 10
    assert spoken <= names | {f"{name}_total" for name in names}
