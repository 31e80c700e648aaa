"""The cache of compiled programs: what a key covers, and that many processes may fill it at once."""

import json
import shutil
import subprocess
import sys

import pytest

from server.compiler.checkpoints.base import locate_base
from shared.recipe import BaseRef, Recipe
from tests import programs
from tests.device_agent.conftest import write_base

SMALL = {"rank": 2, "queries": 1, "effective_batch": 1, "sequence_length": 8, "answer_length": 1, "choices": 2}
COMPILER = """
import sys, time
from pathlib import Path
import server.compiler
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

server.compiler.compile_program = compile_program
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
    "changed",
    [
        "server/compiler/program.py",  # the compiler
        "server/compiler/model/decoder.py",  # a package of it
        "shared/zo/lora.py",  # a module that it imports
        "shared/canonical.py",  # one that this imports in turn
        "shared/zo/__init__.py",  # what runs before them
    ],
)
def test_a_change_of_any_source_is_another_key(tree, changed):
    with (tree / changed).open("a") as file:
        file.write("# changed\n")
    assert programs.source_state(tree) != programs.source_state()


@pytest.mark.parametrize("added", ["server/compiler/model/another.py", "server/compiler/export/table.json"])
def test_a_new_file_of_the_compiler_is_another_key(tree, added):
    (tree / added).write_text("")
    assert programs.source_state(tree) != programs.source_state()


def test_an_import_inside_a_function_counts(tree):
    target = tree / "server" / "ports.py"
    with target.open("a") as file:
        file.write("# changed\n")
    assert programs.source_state(tree) == programs.source_state()
    with (tree / "server/compiler/cost.py").open("a") as file:
        file.write("\n\ndef later():\n    from server import ports\n    return ports\n")
    before = programs.source_state(tree)
    with target.open("a") as file:
        file.write("# changed again\n")
    assert programs.source_state(tree) != before


def test_what_the_compiler_does_not_import_is_no_part_of_the_key(tree):
    (tree / "server" / "app.py").write_text("")
    assert programs.source_state(tree) == programs.source_state()


def test_another_version_of_a_library_is_another_key(monkeypatch):
    before = programs.source_state()
    monkeypatch.setattr(programs, "version", lambda name: "0.0.1" if name == "torch" else "1")
    first = programs.source_state()
    monkeypatch.setattr(programs, "version", lambda name: "0.0.2" if name == "torch" else "1")
    assert len({before, first, programs.source_state()}) == 3


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


def test_what_a_killed_process_left_is_no_program(base, tmp_path):
    store, recipe = programs.ProgramStore(tmp_path / "cache", "state"), recipe_of(base)
    torn = (store.directory / store.key(recipe, base)).with_suffix(".making")
    torn.mkdir()
    (torn / "program.pte").write_bytes(b"torn")
    assert not store.has(recipe, base)
    command = [sys.executable, "-c", COMPILER, tmp_path / "cache", tmp_path / "log", recipe.model_dump_json(), base]
    subprocess.run(command, cwd=programs.ROOT, check=True)
    assert store.has(recipe, base)
