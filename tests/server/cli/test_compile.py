"""`mobizo-server compile`: one real program, and every way around the compiler with a fake one."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from shared.errors import BadRequest, CompileFailed, InvalidRecipe, UnknownBase, UnreadableCheckpoint
from shared.program import ProgramManifest
from shared.zo.lora import flat_size
from tests.server.cli.conftest import FAKE, call

SMALL = {"rank": 2, "queries": 1, "effective_batch": 2, "sequence_length": 16}


@pytest.fixture(scope="module")
def real(llama, tmp_path_factory):
    """(arguments, output directory, figures) of one real compilation."""
    out = tmp_path_factory.mktemp("programs") / "real"
    recipe = write_recipe(out.with_name("recipe.json"), **SMALL, layers="last:50%")
    arguments = ("compile", "--base", llama, "--recipe", recipe, "--to", out, "--json")
    return arguments, out, json.loads(call(*arguments))


@pytest.fixture
def compile_(source, tmp_path):
    def compile_(rank=2, **behaviour):
        (source / "behaviour.json").write_text(json.dumps(behaviour))
        recipe = write_recipe(tmp_path / "recipe.json", **SMALL | {"rank": rank})
        return json.loads(call("compile", "--base", source, "--recipe", recipe, "--to", tmp_path / "out", "--json"))

    return compile_


def write_recipe(path, **settings):
    path.write_text(json.dumps(settings))
    return path


def starts(source):
    return len((source / "starts.log").read_text().split())


@pytest.mark.slow
def test_a_program_and_its_figures(real):
    _, out, figures = real
    manifest = ProgramManifest.model_validate_json((out / "manifest.json").read_bytes())
    assert {path.name for path in out.iterdir()} == {
        "manifest.json",
        "compile.log",
        *(file.name for file in manifest.files),
    }
    assert manifest.version == 1
    recipe = manifest.recipe
    assert (recipe.base.name, recipe.layers, recipe.answer_length, recipe.choices) == ("llama", "last:1", 1, 2)
    assert manifest.size == flat_size(recipe, manifest.shape)
    sizes = {role: (out / manifest.file(role).name).stat().st_size for role in ("program", "weights", "inference")}
    assert figures.pop("seconds") > 0
    assert figures == {
        "recipe_id": recipe.id,
        "cached": False,
        "pte_bytes": sizes["program"],
        "ptd_bytes": sizes["weights"],
        "inference_bytes": sizes["inference"],
        "planned_bytes": manifest.planned_bytes,
        "delegates": manifest.delegates,
        "nodes": manifest.nodes,
        "flops_per_step": manifest.flops_per_step,
    }


@pytest.mark.slow
def test_a_second_run_needs_no_torch(real):
    arguments, _, figures = real
    # Nor does it wait for what only a server's home needs.
    program = "import sys; sys.modules.update(torch=None, sqlalchemy=None); from server.cli.main import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    again = json.loads(process.stdout)
    assert again.pop("cached") is True
    assert {name: again[name] for name in again if name != "seconds"} == {
        name: figures[name] for name in figures if name not in ("seconds", "cached")
    }


def test_what_is_whole_is_not_compiled_again(compile_, source, tmp_path):
    first = compile_()
    assert (first["cached"], starts(source)) == (False, 1)
    assert "inference_bytes" not in first
    assert (compile_()["cached"], starts(source)) == (True, 1)
    other = compile_(3)
    assert (other["cached"], starts(source)) == (False, 2)
    assert other["recipe_id"] != first["recipe_id"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["recipe_id"] == other["recipe_id"]


@pytest.mark.parametrize("name", ["program.pte", "manifest.json"])
def test_what_is_damaged_is_compiled_again(compile_, source, tmp_path, name):
    compile_()
    path = tmp_path / "out" / name
    whole = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole[:-1]), path.unlink, lambda: path.write_bytes(bytes(len(whole)))):
        damage()
        assert compile_()["cached"] is False
        assert path.read_bytes() == whole
        assert compile_()["cached"] is True


def test_another_base_or_another_executorch_is_compiled_again(compile_, source, tmp_path):
    compile_()
    (source / "model.safetensors").write_bytes(b"other weights")
    assert compile_()["cached"] is False
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"executorch": "', '"executorch": "0.'))
    assert compile_()["cached"] is False
    assert compile_()["cached"] is True


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ({"error": {"code": "invalid-recipe", "detail": "rank is odd"}}, InvalidRecipe, "rank is odd"),
        ({"crash": True}, CompileFailed, "compile.log"),
    ],
)
def test_a_failure_leaves_what_was_there(compile_, source, tmp_path, behaviour, error, message):
    with pytest.raises(error, match=message):
        compile_(**behaviour)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compile.log"]
    compile_()
    with pytest.raises(error):
        compile_(3, **behaviour)
    assert compile_()["cached"] is True
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_ctrl_c_ends_the_compiler_too(source, tmp_path):
    (source / "behaviour.json").write_text('{"hang": true}')
    program = f"import server.programs.local as l; l.COMPILER = {FAKE!r}; from server.cli.main import main; main()"
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", program, "compile", "--base", str(source), "--to", str(out)])
    log = source / "starts.log"
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.05)
    compiler = int(log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert not psutil.pid_exists(compiler)
    assert [path.name for path in out.iterdir()] == ["compile.log"]


def test_recipes_that_are_none(source, tmp_path):
    def assert_refused(message):
        with pytest.raises(InvalidRecipe, match=message):
            call("compile", "--base", source, "--recipe", recipe, "--to", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    recipe = tmp_path / "recipe.json"
    assert_refused("recipe.json: cannot be read")
    write_recipe(recipe, precision="int9")
    assert_refused("recipe.json: precision: .*fp32")
    write_recipe(recipe, queries=65)
    assert_refused("estimator 'replay' runs 2q paths at once and has at most 64 queries")
    recipe.write_text("rank: 2")
    assert_refused("recipe.json: Invalid JSON")


def test_bases_that_are_none(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnreadableCheckpoint, match=r"config\.json"):
        call("compile", "--base", tmp_path, "--to", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be a directory"):
        call("compile", "--base", source, "--to", tmp_path / "file")
    with pytest.raises(UnknownBase):
        call("compile", "--base", "no such model", "--to", tmp_path / "out")
