"""Settings from TOML files and flags; errors name the field."""

import pytest

from shared.errors import BadRequest
from simulation.settings import read_settings

FILE = """
devices = 50
[data]
alpha = 0.1
[cohort]
weights = "examples"
[cohort.training]
steps = 7
"""


def test_flags_override_the_file_and_the_defaults(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(FILE)
    settings = read_settings(file, {"devices": 60, "cohort": {"upload": "trajectory"}})
    assert (settings.devices, settings.data.alpha, settings.cohort.weights, settings.cohort.upload) == (
        60,
        0.1,
        "examples",
        "trajectory",
    )
    assert settings.cohort.training.steps == 7
    assert settings.cohort.training.lr == read_settings(None, {}).cohort.training.lr
    assert read_settings(None, {}).devices == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": 0}, "devices"),
        ({"data": {"alpha": -1}}, "data.alpha"),
        ({"faults": {"attack": "unplug"}}, "faults.attack"),
        ({"cohort": {"aggregator": {"name": "mode"}}}, "cohort.aggregator.name"),
        ({"cohort": {"upload": "masked"}}, "masking"),
        ({"nothing": 1}, "nothing"),
        ({"data": {"sources": ["here"]}}, "--base"),
        ({"base": "model.gguf"}, "data.sources"),
        ({"devices": 3, "cohort": {"quorum": 4}}, "quorum"),
    ],
)
def test_invalid_settings_are_named(flags, message):
    with pytest.raises(BadRequest) as error:
        read_settings(None, flags)
    assert message in error.value.detail


def test_invalid_toml_files_are_named(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("devices: 3")
    with pytest.raises(BadRequest, match=r"settings\.toml"):
        read_settings(file, {})
    with pytest.raises(BadRequest, match="absent"):
        read_settings(tmp_path / "absent", {})
