"""Compiled files: what is shared between recipes, what the manifest says, what is refused."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from server.compiler.program import compile_program
from shared.canonical import file_sha256
from shared.errors import InvalidRecipe
from shared.recipe import BaseRef
from shared.zo.lora import flat_size
from tests.server.compiler.conftest import VOCABULARY


def test_the_manifest_describes_the_files(plain):
    manifest = plain.manifest
    for file in manifest.files:
        path = plain.directory / file.name
        assert (file.size, file.sha256) == (path.stat().st_size, file_sha256(path))
    assert manifest.recipe_id == manifest.recipe.id
    assert manifest.size == flat_size(manifest.recipe, manifest.shape)
    assert manifest.delegates == 2 * (manifest.shape.layers + 1)  # step's and score's: one a layer, and the head
    assert manifest.planned_bytes > 4 * manifest.size
    # 16 rows of 12 tokens, 2 layers: 7,680 base and 448 LoRA weights a token, attention, 2 answers' logits
    assert manifest.flops_per_step == 2 * (2 * (192 * (7680 + 448) + 2 * 16 * 144 * 32) + 16 * 2 * 32 * 96)
    tokenizer = Tokenizer.from_file(str(plain.directory / manifest.file("tokenizer").name))
    assert tokenizer.get_vocab_size() == manifest.shape.vocabulary == VOCABULARY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": BaseRef(name="tiny", sha256="0" * 64)}, r"base\.sha256"),
        ({"sequence_length": 65}, "sequence_length 65 exceeds the model's context of 64"),
        ({"answer_length": 12}, "answer_length 12"),  # leaves no room for a prompt
        ({"backend": "portable", "precision": "int4"}, "int4 is not one that backend portable has"),
        ({"backend": "torch", "precision": "int8"}, r"int8 is not one that backend torch has \(fp32\)"),
        ({"backend": "vulkan", "precision": "int4"}, "int4 is not one that backend vulkan has"),
    ],
)
def test_what_cannot_be_compiled_is_refused(tiny, tmp_path, changes, message):
    with pytest.raises(InvalidRecipe, match=message):
        compile_program(tiny.recipe().model_copy(update=changes), str(tiny.directory), tmp_path, None)


def run_compiler(recipe, source, out):
    path = out / "recipe.json"
    path.write_text(recipe)
    process = subprocess.run(
        [sys.executable, "-m", "server.compiler", str(path), source, str(out / "program")],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, [json.loads(line) for line in process.stdout.splitlines()]


def test_the_process_reports_an_error_as_one_line(tiny, tmp_path):
    code, lines = run_compiler(tiny.recipe().model_dump_json().replace('"rank":4', '"rank":0'), "none", tmp_path)
    assert (code, len(lines)) == (1, 1)
    assert lines[0]["error"]["code"] == "invalid-recipe"
    assert "rank" in lines[0]["error"]["detail"]
