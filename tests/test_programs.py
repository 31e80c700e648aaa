"""The cache of compiled programs: what a key covers, and that many processes may fill it at once."""

import json
import shutil
import subprocess
import sys

import pytest

from server.compiler.checkpoints.base import locate_base
from shared.recipe import BaseRef, Recipe
from tests import programs
from tests.device_agent.tiny import write_base

SMALL = {"rank": 2, "queries": 1, "effective_batch": 1, "sequence_length": 8, "answer_length": 1, "choices": 2}
COMPILER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.programs import ProgramStore

directory, log, recipe, source = sys.argv[1:]

def compile_program(recipe, source, out_dir, *, inference, calibration, kept):
    with Path(log).open("a") as file:
        file.write("compiled\\n")
    time.sleep(0.5)
    (out_dir / "program.pte").write_bytes(b"program")
    return Manifest()

class Manifest:
    def model_dump_json(self):
        return "{}"

sys.modules["server.compiler.program"] = SimpleNamespace(compile_program=compile_program)
from shared.recipe import Recipe
kept = ProgramStore(Path(directory), "state").compiled(Recipe.model_validate_json(recipe), source)
assert (kept / "program.pte").read_bytes() == b"program"
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the packages that the compiler is made of."""
    for name in programs.PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(programs.ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    return tmp_path / "tree"


@pytest.fixture
def base(tmp_path):
    write_base(tmp_path / "base")
    return tmp_path / "base"


def recipe_of(base, **changes):
    reference = BaseRef(name="tiny", sha256=locate_base(str(base)).sha256)
    return Recipe(base=reference, **(SMALL | changes))


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("server/compiler/model/decoder.py", True),
        ("server/compiler/export/table.json", True),  # a new file of the compiler
        ("shared/canonical.py", True),  # imported by a module that the compiler imports
        ("shared/zo/__init__.py", True),  # what runs before them
        ("server/app.py", False),
    ],
)
def test_a_change_of_any_source_of_the_compiler_is_another_key(tree, path, counts):
    with (tree / path).open("a") as file:
        file.write("# changed\n")
    assert (programs.source_state(tree) != programs.source_state()) == counts


def test_recipe_base_and_inference_file_are_in_the_key(base, tmp_path):
    store = programs.ProgramStore(tmp_path / "cache", "state")
    recipe = recipe_of(base)
    keys = {store.key(recipe, base), store.key(recipe, base, inference=True), store.key(recipe_of(base, rank=3), base)}
    keys.add(store.key(recipe.model_copy(update={"calibration": "c" * 64}), base))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    keys.add(store.key(recipe, base))  # the recipe names the base as it was: the compiler is to refuse it
    assert len(keys) == 5


def test_processes_that_need_one_program_compile_it_once(base, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", COMPILER, tmp_path / "cache", log, recipe_of(base).model_dump_json(), base]
    running = [subprocess.Popen(command, cwd=programs.ROOT) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert log.read_text() == "compiled\n"
