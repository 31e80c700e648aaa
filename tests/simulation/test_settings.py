"""TOML and flags become settings; mistakes are named."""

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


def test_flags_take_the_place_of_the_files_and_defaults_fill_the_rest(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(FILE)
    found = read_settings(file, {"devices": 60, "cohort": {"upload": "trajectory"}})
    assert (found.devices, found.data.alpha, found.cohort.weights, found.cohort.upload) == (
        60,
        0.1,
        "examples",
        "trajectory",
    )
    assert found.cohort.training.steps == 7
    assert found.cohort.training.lr == read_settings(None, {}).cohort.training.lr
    assert read_settings(None, {}).devices == 200


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_a_mistake_is_named(given, said):
    with pytest.raises(BadRequest) as caught:
        read_settings(None, given)
    assert said in caught.value.detail


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("devices: 3")
    with pytest.raises(BadRequest, match=r"settings\.toml"):
        read_settings(file, {})
    with pytest.raises(BadRequest, match="absent"):
        read_settings(tmp_path / "absent", {})
