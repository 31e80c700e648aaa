"""Formats as the registry serves them: made once, checked against the version's facts, refused by name."""

import hashlib

import numpy as np

from server.registry.exports.gguf import gguf_lora
from server.registry.models import StoredVersion
from shared.recipe import Recipe
from tests.server.homes import SHAPE

URL = "/v1/adapters/alice-movies/versions/1/peft"


def test_a_gguf_adapter_is_made_once(home, app, version):
    answer = app.get(f"{URL}/adapter.gguf")
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    flat = np.full(version["size_d"], 0.5, np.float32)
    assert answer.content == gguf_lora(Recipe.model_validate(version["recipe"]), SHAPE, flat, version["a_sha256"])
    stored_files = home.stored_files()
    assert app.get(f"{URL}/adapter.gguf").content == answer.content
    assert home.stored_files() == stored_files


def test_another_a_is_refused_and_nothing_is_made(home, app, version, problem):
    home.change(StoredVersion, a_sha256="0" * 64)
    stored_files = home.stored_files()
    problem(app.get(f"{URL}/adapter.gguf"), 422, "a-mismatch")
    problem(app.get(URL), 422, "a-mismatch")
    problem(app.get(f"{URL}/adapter_model.safetensors"), 422, "a-mismatch")
    assert home.stored_files() == stored_files
