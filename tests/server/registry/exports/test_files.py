"""Formats as the registry serves them: made once, checked against the version's facts, refused by name."""

import hashlib

import gguf
import numpy as np
import pytest
from sqlalchemy import update

from server.registry.models import StoredVersion
from shared.recipe import Recipe
from shared.zo.lora import init_a, lora_modules
from tests.server.conftest import SHAPE

URL = "/v1/adapters/alice-movies/versions/1/peft"


@pytest.fixture
def version(device, lease):
    return device.finish(lease)


def test_a_gguf_adapter(home, app, version, tmp_path):
    answer = app.get(f"{URL}/adapter.gguf")
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    path = tmp_path / "adapter.gguf"
    path.write_bytes(answer.content)
    reader = gguf.GGUFReader(path)
    assert reader.fields["mobizo.base_sha256"].contents() == version["recipe"]["base"]["sha256"]
    assert reader.fields["mobizo.a_sha256"].contents() == version["a_sha256"]
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    recipe = Recipe.model_validate(version["recipe"])
    module = next(module for module in lora_modules(recipe, SHAPE) if module.target == "v_proj")
    np.testing.assert_array_equal(found[f"blk.{module.layer}.attn_v.weight.lora_a"], init_a(recipe, module).T)
    stored = home.stored_files()
    assert app.get(f"{URL}/adapter.gguf").content == answer.content
    assert home.stored_files() == stored


def test_another_a_is_refused_and_nothing_is_made(home, app, version, problem):
    with home.database.writing() as session:
        session.execute(update(StoredVersion).values(a_sha256="0" * 64))
    stored = home.stored_files()
    problem(app.get(f"{URL}/adapter.gguf"), 422, "a-mismatch")
    problem(app.get(URL), 422, "a-mismatch")
    problem(app.get(f"{URL}/adapter_model.safetensors"), 422, "a-mismatch")
    assert home.stored_files() == stored
