"""Compiled files: what is shared between recipes, what the manifest says, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from server.compiler import compile_program
from shared.canonical import file_sha256
from shared.errors import InvalidRecipe
from shared.recipe import BaseRef
from shared.zo.lora import flat_size
from tests.programs import shared_store
from tests.server.compiler.conftest import Programs, TinyBase


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["full", "candidates"])
def test_weights_are_identical_for_every_recipe(programs: Programs, tmp_path: Path, loss: str) -> None:
    backend = "xnnpack" if loss == "full" else "portable"
    program, base = programs(1, "rademacher", loss, backend)
    other_loss, other_backend = ("candidates", "portable") if loss == "full" else ("full", "xnnpack")
    other = base.recipe(
        queries=2, effective_batch=3, sequence_length=9, targets=("down_proj",), loss=other_loss, backend=other_backend
    )
    manifest = shared_store().put(other, base.directory, tmp_path)
    assert manifest.file("weights").sha256 == program.manifest.file("weights").sha256
    assert file_sha256(tmp_path / "weights.ptd") == file_sha256(program.directory / "weights.ptd")


@pytest.mark.slow
def test_compiling_twice_gives_the_same_program(programs: Programs, tmp_path: Path) -> None:
    program, base = programs(1, "rademacher", "candidates", "portable")
    manifest = compile_program(program.manifest.recipe, str(base.directory), tmp_path, inference=False)
    assert manifest == program.manifest


def test_the_manifest_describes_the_files(programs: Programs) -> None:
    program, base = programs(4, "rademacher", "full", "xnnpack")
    manifest = program.manifest
    for file in manifest.files:
        path = program.directory / file.name
        assert (file.size, file.sha256) == (path.stat().st_size, file_sha256(path))
    assert manifest.recipe_id == manifest.recipe.id
    assert manifest.size == flat_size(manifest.recipe, manifest.shape)
    assert manifest.delegates == 2 * manifest.shape.layers  # step's and score's, one a layer
    assert manifest.planned_bytes > 4 * manifest.size
    # 16 rows of 12 tokens, 2 layers: 7,680 base and 448 LoRA weights a token, attention, 2 answers' logits
    assert manifest.flops_per_step == 2 * (2 * (192 * (7680 + 448) + 2 * 16 * 144 * 32) + 16 * 2 * 32 * 96)
    tokenizer = Tokenizer.from_file(str(program.directory / manifest.file("tokenizer").name))
    assert tokenizer.get_vocab_size() == manifest.shape.vocabulary
    assert base.model.config.vocab_size == manifest.shape.vocabulary


def test_a_base_that_is_not_the_recipes_is_refused(tiny: TinyBase, tmp_path: Path) -> None:
    recipe = tiny.recipe().model_copy(update={"base": BaseRef(name="tiny", sha256="0" * 64)})
    with pytest.raises(InvalidRecipe, match=r"base\.sha256"):
        compile_program(recipe, str(tiny.directory), tmp_path, None)


def test_a_sequence_over_the_context_is_refused(tiny: TinyBase, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match="sequence_length 65 exceeds the model's context of 64"):
        compile_program(tiny.recipe(sequence_length=65), str(tiny.directory), tmp_path, None)


def test_an_answer_without_a_prompt_is_refused(tiny: TinyBase, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match="answer_length 12"):
        compile_program(tiny.recipe(answer_length=12), str(tiny.directory), tmp_path, None)


def run_compiler(recipe: str, source: str, out: Path) -> tuple[int, list[dict]]:
    path = out / "recipe.json"
    path.write_text(recipe)
    done = subprocess.run(
        [sys.executable, "-m", "server.compiler", str(path), source, str(out / "program")],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_process_reports_progress_and_the_manifest(tiny: TinyBase, tmp_path: Path) -> None:
    recipe = tiny.recipe(queries=1, backend="portable")
    code, lines = run_compiler(recipe.model_dump_json(), str(tiny.directory), tmp_path)
    assert code == 0
    assert [line["stage"] for line in lines[:-1]] == sorted(
        (line["stage"] for line in lines[:-1]), key=["read", "lower", "emit"].index
    )
    assert lines[-1]["manifest"]["recipe_id"] == recipe.id


def test_the_process_reports_an_error_as_one_line(tiny: TinyBase, tmp_path: Path) -> None:
    code, lines = run_compiler(tiny.recipe().model_dump_json().replace('"rank":4', '"rank":0'), "none", tmp_path)
    assert (code, len(lines)) == (1, 1)
    assert lines[0]["error"]["code"] == "invalid-recipe"
    assert "rank" in lines[0]["error"]["detail"]


def test_heavy_methods_come_and_go_without_touching_b(programs: Programs) -> None:
    program, _ = programs(4, "rademacher", "full", "xnnpack")
    b = np.arange(program.manifest.size, dtype=np.float32)
    program("load", b)
    for name in ("step", "score", "replay", "load"):
        program.reload(name)
    assert np.array_equal(program("adapter")[0], b)
    program.reload("adapter")
    assert not program("adapter")[0].any()
