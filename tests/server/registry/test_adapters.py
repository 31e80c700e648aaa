"""The registry: immutable versions, and one version as a PEFT directory."""

import json

import numpy as np
import pytest
import safetensors.numpy

from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.lora import init_a, lora_modules
from tests.server.homes import SHAPE

URL = "/v1/adapters/alice-movies"


@pytest.mark.both_databases
def test_versions_count_up_and_stay(fleet, app, device, version):
    first = app.get(f"{URL}/versions/1").json()
    assert first == version
    fleet.ready_job(app)
    second = device.finish(device.lease(), tuned_accuracy=0.8)
    assert (second["version"], second["sha256"]) == (2, version["sha256"])  # the same bytes may be two versions
    assert app.get(f"{URL}/versions/1").json() == first
    adapter = app.get(URL).json()
    assert adapter["versions"] == 2
    assert adapter["latest"] == second
    assert adapter["user"] == "alice"
    assert app.get("/v1/adapters").json()["items"] == [adapter]


def test_a_peft_directory(home, app, device, lease):
    size = lease["manifest"]["manifest"]["size"]
    flat = np.arange(size, dtype=np.float32)
    device.finish(lease, flat)
    listing = app.get(f"{URL}/versions/1/peft").json()
    stored_files = home.stored_files()
    assert app.get(f"{URL}/versions/1/peft").json() == listing
    assert home.stored_files() == stored_files
    assert [file["path"] for file in listing["files"]] == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "mobizo.json",
    ]
    files = {}
    for file in listing["files"]:
        response = app.get(f"{URL}/versions/1/peft/{file['path']}")
        assert len(response.content) == file["size"]
        assert sha256_hex(response.content) == file["sha256"]
        assert response.headers["etag"] == f'"{file["sha256"]}"'
        files[file["path"]] = response.content
    config = json.loads(files["adapter_config.json"])
    assert config["peft_type"] == "LORA"
    assert config["r"] == 2
    assert config["base_model_name_or_path"] == "acme/tiny"  # the Hub's id of the base
    # What vLLM refuses (vllm/lora/peft_helper.py).
    assert config["bias"] == "none"
    assert not config.get("modules_to_save")
    assert not config.get("use_dora")
    tensors = safetensors.numpy.load(files["adapter_model.safetensors"])
    recipe = Recipe.model_validate(lease["job"]["recipe"])
    modules = lora_modules(recipe, SHAPE)
    assert len(tensors) == 2 * len(modules)
    for module in modules:
        name = f"base_model.model.{module.name}"
        np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], module.b(flat).T)
        np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], init_a(recipe, module).T)
    card = files["README.md"].decode()
    assert "library_name: peft" in card
    assert "75.0%" in card
    assert lease["job"]["recipe_id"] in card


@pytest.mark.parametrize(
    ("changes", "eps"),
    [
        ({}, "0.01"),
        ({"recipe": {"precision": "int8", "layers": [1]}}, "0.05"),
        ({"recipe": {"precision": "int8"}, "training": {"eps": 0.02}}, "0.02"),
    ],
)
def test_the_card_says_which_eps_was_used(fleet, app, device, changes, eps):
    fleet.ready_job(app, **changes)
    device.finish(device.lease())
    card = app.get(f"{URL}/versions/1/peft/README.md").text
    assert f"eps {eps} |" in card
    assert f"frozen weights in {changes.get('recipe', {}).get('precision', 'fp32')}" in card
    assert ("| adapted layers | last:1 |" in card) == ("layers" in changes.get("recipe", {}))
