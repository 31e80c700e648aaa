"""The registry: immutable versions, and one version as a PEFT directory."""

import json

import numpy as np
import pytest
import safetensors.numpy

from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.lora import init_a, lora_modules
from tests.server.conftest import SHAPE, adapter_bytes, result


@pytest.fixture
def version(device, lease):
    return device.finish(lease)


URL = "/v1/adapters/alice-movies"


def test_versions_count_up_and_stay(fleet, app, device, version):
    first = app.get(f"{URL}/versions/1").json()
    assert first == version
    fleet.ready_job(app)
    second = device.finish(device.lease(), 0.25, tuned_accuracy=0.8)
    assert second["version"] == 2
    assert app.get(f"{URL}/versions/1").json() == first
    shown = app.get(URL).json()
    assert shown["versions"] == 2
    assert shown["latest"] == second
    assert shown["user"] == "alice"
    assert app.get("/v1/adapters").json()["items"] == [shown]


def test_the_same_bytes_may_be_two_versions(fleet, app, device, version):
    fleet.ready_job(app)
    again = device.finish(device.lease())
    assert (again["version"], again["sha256"]) == (2, version["sha256"])


def test_facts_of_a_version(app, device, version, lease):
    manifest = lease["manifest"]["manifest"]
    assert version["job_id"] == lease["job"]["id"]
    assert version["device_id"] == device.device_id
    assert version["a_sha256"] == manifest["a_sha256"]
    assert version["size_d"] == manifest["size"]
    assert version["recipe"] == manifest["recipe"]


def test_download_of_lora_b(app, version):
    response = app.get(f"{URL}/versions/1/lora_B.safetensors")
    assert sha256_hex(response.content) == version["sha256"]
    assert len(response.content) == version["size"]
    assert response.headers["etag"] == f'"{version["sha256"]}"'
    assert app.get(response.url.path, headers={"Range": "bytes=0-7"}).content == response.content[:8]
    assert app.head(response.url.path).headers["content-length"] == str(version["size"])


def test_a_peft_directory(fleet, app, device, lease):
    size = lease["manifest"]["manifest"]["size"]
    flat = np.arange(size, dtype=np.float32)
    data = safetensors.numpy.save({"lora_B": flat})
    device.upload(lease, data)
    body = {"adapter_sha256": sha256_hex(data), "result": result()}
    assert device.post(f"/v1/leases/{lease['id']}/complete", json=body).status_code == 200
    listing = app.get(f"{URL}/versions/1/peft").json()
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
    assert config["base_model_name_or_path"] == "tiny"
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


def test_the_directory_is_made_once(fleet, home, app, version):
    first = app.get(f"{URL}/versions/1/peft").json()
    stored = home.stored_files()
    assert app.get(f"{URL}/versions/1/peft").json() == first
    assert home.stored_files() == stored
    with_range = app.get(f"{URL}/versions/1/peft/README.md", headers={"Range": "bytes=0-2"})
    assert (with_range.status_code, with_range.content) == (206, b"---")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nothing", "adapter-not-found"),
        ("nothing/versions/1", "adapter-not-found"),
        ("alice-movies/versions/2", "revision-not-found"),
        ("alice-movies/versions/2/peft", "revision-not-found"),
        ("alice-movies/versions/1/peft/x", "file-not-in-adapter"),
        ("alice-movies/versions/2/lora_B.safetensors", "revision-not-found"),
        ("alice-movies/versions/1/peft/..%2f..%2fx", "not-found"),
    ],
)
def test_what_is_not_there(app, version, problem, path, code):
    problem(app.get(f"/v1/adapters/{path}"), 404, code)


@pytest.mark.parametrize("number", ["0", "-1", "x", str(2**31), str(2**80)])
def test_versions_that_are_none(app, version, problem, number):
    problem(app.get(f"{URL}/versions/{number}"), 422, "invalid-request")


def test_adapters_of_finished_jobs_only(app, device, lease):
    device.upload(lease, adapter_bytes(lease["manifest"]["manifest"]["size"]))
    assert app.get("/v1/adapters").json()["items"] == []
