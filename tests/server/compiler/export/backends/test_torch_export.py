"""The `.pt2` archive and its weights file: what is shared, what is left out, what is said of this machine."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from server.compiler.program import compile_program
from shared.canonical import file_sha256
from shared.zo.lora import init_a, lora_modules
from tests.programs import shared_store

ROOT = Path(__file__).resolve().parents[5]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("torch")
    return directory, shared_store().put(
        tiny.recipe(backend="torch", queries=2), tiny.directory, directory, inference=True
    )


def records(directory):
    with zipfile.ZipFile(directory / "program.pt2") as archive:
        for name in archive.namelist():
            yield name.split("/", 1)[1], archive.read(name)


def test_the_weights_are_the_bases_alone(program, tiny, tmp_path):
    directory, manifest = program
    other = tiny.recipe(
        backend="torch", queries=1, estimator="stored", targets=("down_proj",), layers="last:1", sequence_length=9
    )
    second = shared_store().put(other, tiny.directory, tmp_path)
    assert second.file("weights").sha256 == manifest.file("weights").sha256
    weights = load_file(directory / "weights.safetensors")
    model = tiny.model.state_dict()
    np.testing.assert_array_equal(weights["backbone.embedding"], model["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights["layers.1.frozen.down_proj"], model["model.layers.1.mlp.down_proj.weight"])
    assert sum(array.size for array in weights.values()) == sum(tensor.numel() for tensor in model.values())


def test_compiling_twice_gives_the_same_program(program, tiny, tmp_path):
    directory, manifest = program
    assert compile_program(manifest.recipe, str(tiny.directory), tmp_path) == manifest
    assert file_sha256(tmp_path / "program.pt2") == file_sha256(directory / "program.pt2")


def test_the_archive_holds_what_the_recipe_adds_and_nothing_twice(program, tiny):
    directory, manifest = program
    entries = dict(records(directory))
    own = {
        "data/weights/tensor_state.flat_b",
        *(f"data/weights/tensor_{name}" for name in load_file(directory / "weights.safetensors")),
    }
    assert {name for name in entries if name.startswith("data/weights/tensor_") and not entries[name]} == own
    (module, *_) = lora_modules(manifest.recipe, manifest.shape)
    a = np.ascontiguousarray(init_a(manifest.recipe, module).T) * np.float32(manifest.recipe.scale)
    assert [data for name, data in entries.items() if name.startswith("data/weights/")].count(a.tobytes()) == 1
    assert json.loads(entries["extra/state.json"]) == ["state.flat_b"]
    assert {
        name.removeprefix("models/").removesuffix(".json") for name in entries if name.startswith("models/")
    } == set(manifest.methods)


def test_nothing_is_pickled_and_nothing_tells_of_this_machine(program):
    directory, _ = program
    entries = 0
    for name, data in records(directory):
        if name.startswith("data/sample_inputs/"):
            assert data == b""
        if name.endswith("_config.json"):
            configs = json.loads(data)["config"].values()
            entries += len(configs)
            assert not any(entry["use_pickle"] for entry in configs)
        if name.startswith("models/"):
            assert str(ROOT).encode() not in data
            assert b"site-packages" not in data
            assert b".py" not in data
            assert all(not node["metadata"] for node in json.loads(data)["graph_module"]["graph"]["nodes"])
    assert entries > 20
