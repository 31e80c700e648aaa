"""docs/operations.md: the settings and the metrics that it names exist."""

import re
from pathlib import Path

from server.operations.metrics import Exposition
from server.settings import Settings

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()


def test_every_setting_exists():
    fields = {f"MOBIZO_{name}".upper() for name in Settings.model_fields}
    other_variables = {"MOBIZO_NAME", "MOBIZO_SECRETS", "MOBIZO_MODELS"}
    assert {name.removesuffix("_FILE") for name in re.findall(r"MOBIZO_[A-Z_]+", TEXT)} <= fields | other_variables


def test_every_metric_exists(fleet, standing):
    state = standing[0].state.mobizo
    text = Exposition(state.meters, state.database).text().decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    mentioned_names = set(re.findall(r"`((?:mobizo|process)_[a-z_]+)", TEXT)) - {"process_"}
    assert len(mentioned_names) > 10
    assert mentioned_names <= names | {f"{name}_total" for name in names}
