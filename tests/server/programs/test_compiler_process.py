"""The compiler as a child process: what it reports, how it dies, and that nothing of it stays."""

import json
import sys

import psutil
import pytest

from server.programs.compiler_process import CompilerCrashed, CompilerProcess
from server.tasks.child_process import Stopped
from shared.errors import CompileFailed, InvalidRecipe, Unavailable, UnsupportedModel
from shared.recipe import Recipe
from tests.server import fake_compiler
from tests.server.homes import alive, eventually, write_source


@pytest.fixture
def recipe():
    return Recipe(base={"name": "tiny", "sha256": "b" * 64}, rank=2, sequence_length=16, answer_length=1, choices=2)


@pytest.fixture
def source(tmp_path):
    write_source(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def compile_(tmp_path, source, recipe):
    def compile_(keep=lambda: True, memory_limit=None, command=None, **behaviour):
        (source / "behaviour.json").write_text(json.dumps(behaviour))
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        command = command or [sys.executable, fake_compiler.__file__]
        return CompilerProcess(command, 0.05, memory_limit, keep).run(recipe, str(source), workspace)

    return compile_


def started(source):
    return [int(line) for line in (source / "starts.log").read_text().split()]


@pytest.mark.parametrize("kind", [InvalidRecipe, UnsupportedModel, CompileFailed])
def test_a_reported_error_is_that_error(compile_, kind):
    with pytest.raises(kind, match="the reason"):
        compile_(error={"code": kind.code, "detail": "the reason"})


def test_a_crash(compile_):
    with pytest.raises(CompilerCrashed, match="signal 11"):
        compile_(crash=True)


@pytest.mark.parametrize(("setting", "expected"), [(None, "1"), ("3", "3")])
def test_one_thread_unless_the_operator_sets_another_number(compile_, monkeypatch, setting, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    error = '{"error": {"code": "compile-failed", "detail": "threads: " + os.environ["OMP_NUM_THREADS"]}}'
    with pytest.raises(CompileFailed, match=f"threads: {expected}"):
        compile_(command=[sys.executable, "-c", f"import json, os; print(json.dumps({error}))"])


SILENT = ("pass", "print('[1]')", "print('{\"error\"')", "print('\\x00\\xff')")


@pytest.mark.parametrize("command", [["/nonexistent"], *([sys.executable, "-c", script] for script in SILENT)])
def test_an_end_without_a_word_is_a_crash(compile_, command):
    with pytest.raises(CompilerCrashed):
        compile_(command=command)


@pytest.mark.parametrize("script", ["print('{\"manifest\": {}}')", "print('{\"manifest\": 1}')"])
def test_a_manifest_that_is_none(compile_, script):
    with pytest.raises(CompileFailed, match="invalid manifest") as error_info:
        compile_(command=[sys.executable, "-c", script])
    assert not isinstance(error_info.value, CompilerCrashed)


@pytest.mark.parametrize("script", ["print('{\"error\": 1}')", 'print(\'{"error": {"code": "new-one"}}\')'])
def test_an_error_of_another_form_is_no_crash(compile_, script):
    with pytest.raises(Exception, match=r".") as error_info:
        compile_(command=[sys.executable, "-c", script])
    assert not isinstance(error_info.value, CompilerCrashed | Unavailable)


def test_another_recipe_s_program(compile_, source, recipe, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(recipe.model_copy(update={"rank": 3}).model_dump_json())
    script = (
        "import sys; from tests.server import fake_compiler as f; "
        f"sys.argv = ['x', {str(other)!r}, sys.argv[2], sys.argv[3]]; f.main()"
    )
    with pytest.raises(CompileFailed, match="another recipe"):
        compile_(command=[sys.executable, "-c", script])


def test_what_is_not_wanted_is_stopped(compile_, source):
    calls = []

    def keep():
        calls.append(1)
        return not (source / "starts.log").exists()

    with pytest.raises(Stopped):
        compile_(keep, hang=True)
    assert not any(psutil.pid_exists(pid) for pid in started(source))


def test_memory_has_a_limit(compile_, source):
    with pytest.raises(CompileFailed, match="memory") as error_info:
        compile_(memory=400, memory_limit=300 << 20)
    assert not isinstance(error_info.value, CompilerCrashed)
    assert not any(psutil.pid_exists(pid) for pid in started(source))


def test_grandchildren_die_too(compile_, source, tmp_path):
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    pid_file = tmp_path / "pid"
    with pytest.raises(Stopped):
        compile_(lambda: not (pid_file.exists() and pid_file.read_text()), command=[sys.executable, "-c", script])
    # It was sent SIGKILL before its parent was waited for; a busy machine takes a moment to carry that out.
    eventually(lambda: not alive(int(pid_file.read_text())))
