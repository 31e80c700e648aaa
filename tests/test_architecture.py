"""The import arrows of the house: who may know whom."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "server", "device_agent", "mobizo", "simulation")
RUNTIME = {"torch", "executorch"}
WEB = {"fastapi", "starlette", "uvicorn"}


def modules(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def imports(path):
    """Every module that a file imports, inside functions too, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(path):
    return {name.split(".")[0] for name in imports(path)}


def is_under(path, *folders):
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


@pytest.mark.parametrize(
    ("folder", "may_not"),
    [
        ("shared", {"server", "device_agent", "mobizo", "simulation", "sqlalchemy", *RUNTIME, *WEB}),
        ("server", {"device_agent", "mobizo", "simulation"}),
        ("device_agent", {"server", "mobizo", "simulation", "sqlalchemy", "transformers", *WEB}),
        ("simulation", {"mobizo", "sqlalchemy", "transformers", *RUNTIME, *WEB}),
        ("mobizo", {"server", "device_agent", "sqlalchemy", *RUNTIME, *WEB}),
        ("server/compiler", {"sqlalchemy", *WEB}),
    ],
)
def test_arrows(folder, may_not):
    found = modules(folder)
    assert found, f"{folder} has no modules: the test looks in the wrong place"
    wrong = {str(path.relative_to(ROOT)): sorted(tops(path) & may_not) for path in found if tops(path) & may_not}
    assert not wrong


def test_the_compiler_knows_nothing_else_of_the_server():
    for path in modules("server/compiler"):
        other = {name for name in imports(path) if name.startswith("server.")}
        assert all(name.startswith("server.compiler") for name in other), (path, other)


def test_a_simulation_knows_the_server_by_its_compiler_alone():
    for path in modules("simulation"):
        other = {name for name in imports(path) if name.startswith("server")}
        allowed = ("server.compiler", "server.local_compilation")
        assert all(name.startswith(allowed) for name in other), (path, other)


def test_a_client_loads_simulation_only_when_it_simulates():
    tree = ast.parse((ROOT / "mobizo" / "cli.py").read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert "simulation" in tops(ROOT / "mobizo" / "cli.py")
    assert not any(name.startswith("simulation") for name in top)


@pytest.mark.parametrize("name", ["frozen", "peft", "gguf_lora", "table"])
def test_a_converter_needs_numpy_safetensors_and_gguf_only(name):
    others = {found for found in imports(ROOT / "server" / "formats" / f"{name}.py") if found.startswith("server.")}
    assert all(found.startswith("server.formats") for found in others)
    foreign = tops(ROOT / "server" / "formats" / f"{name}.py") - {"server", "shared", *sys.stdlib_module_names}
    assert foreign <= {"numpy", "safetensors", "gguf"}


def test_executorch_is_touched_in_two_places_only():
    for path in (file for package in PACKAGES for file in modules(package)):
        if not is_under(path, "server/compiler", "device_agent/runtimes"):
            assert not tops(path) & RUNTIME, path


def test_the_http_library_is_imported_in_one_module():
    users = [path for package in PACKAGES for path in modules(package) if "httpx" in tops(path)]
    assert users == [ROOT / "shared" / "transport.py"]


def test_every_module_says_what_it_is():
    for path in (file for package in PACKAGES for file in modules(package)):
        if path.name != "__main__.py" and not is_under(path, "server/migrations"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
