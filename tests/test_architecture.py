"""The import arrows of the house: who may know whom."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "server", "device_agent", "mobizo", "simulation")
RUNTIME = {"torch", "executorch"}
WEB = {"fastapi", "starlette", "uvicorn"}
FOREIGN = {*RUNTIME, "transformers", "sqlalchemy", "alembic", "dp_accounting"}


def modules(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imports(path):
    """Every module that a file imports, inside functions too, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return names


def tops(path):
    return {name.split(".")[0] for name in imports(path)}


def is_under(path, *folders):
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


@pytest.mark.parametrize(
    ("folder", "may_not"),
    [
        ("shared", {"server", "device_agent", "mobizo", "simulation", "sqlalchemy", *RUNTIME, *WEB}),
        ("server", {"device_agent", "mobizo", "simulation"}),
        ("device_agent", {"server", "mobizo", "simulation", "sqlalchemy", "transformers", "fastapi"}),
        ("simulation", {"mobizo", "sqlalchemy", "transformers", *RUNTIME, *WEB}),
        ("mobizo", {"server", "sqlalchemy", "transformers", *RUNTIME, *WEB}),
        ("server/compiler", {"sqlalchemy", *WEB}),
    ],
)
def test_arrows(folder, may_not):
    found = modules(folder)
    assert found, f"{folder} has no modules: the test looks in the wrong place"
    wrong = {str(path.relative_to(ROOT)): sorted(tops(path) & may_not) for path in found if tops(path) & may_not}
    assert not wrong


# The packages of the server, lowest first: a package may import those before it, never those after it.
LAYERS = (
    *("logs", "ports", "settings", "database", "storage", "web", "tasks", "identity", "compiler"),
    *("catalog", "programs", "jobs", "registry", "federation", "results", "inference", "webhooks"),
    *("operations", "dashboard"),
    *("schema", "wiring", "app", "serving", "worker", "cli"),
)


def package_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1]


def arrows(top):
    """Every import from one package of a top-level folder to another: (file, package, imported package)."""
    own = {package_of(path) for path in modules(top)}
    for path in modules(top):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == top and len(parts) > 1 and parts[1] in own and parts[1] != package_of(path):
                yield path.relative_to(ROOT / top).with_suffix("").as_posix(), package_of(path), parts[1]


@pytest.mark.parametrize("top", ["server", "device_agent", "shared"])
def test_no_import_cycles(top):
    graph = {}
    for _, package, imported in arrows(top):
        graph.setdefault(package, set()).add(imported)
    # Raises CycleError, which names the packages of a cycle.
    assert list(TopologicalSorter(graph).static_order())


def test_layers_of_the_server():
    assert {package_of(path) for path in modules("server")} - {"__init__"} == set(LAYERS)
    upwards = {
        (file, imported)
        for file, package, imported in arrows("server")
        if package != "__init__" and LAYERS.index(imported) > LAYERS.index(package)
    }
    assert not upwards


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("server/compiler", ("server.compiler",)),
        ("server/tasks", ("server.tasks", "server.database", "server.storage.store", "server.settings")),
        ("simulation", ("server.compiler", "server.programs.local")),
    ],
)
def test_a_folder_knows_nothing_else_of_the_server(folder, allowed):
    for path in modules(folder):
        other = {name for name in imports(path) if name.startswith("server.") and not name.startswith(allowed)}
        assert not other, (path, other)


def test_a_client_knows_the_device_only_in_quickstart():
    users = [path for path in modules("mobizo") if "device_agent" in tops(path)]
    assert users
    assert all(is_under(path, "mobizo/quickstart") for path in users)


@pytest.mark.parametrize(("package", "command"), [("simulation", "simulate"), ("mobizo.quickstart", "quickstart")])
def test_a_client_loads_what_is_not_the_clients_only_in_its_command(package, command):
    own = [path for path in modules("mobizo") if not is_under(path, package.replace(".", "/"))]
    users = [path.name for path in own if any(name.startswith(package) for name in imports(path))]
    assert users == [f"{command}.py"]
    tree = ast.parse((ROOT / "mobizo" / "cli" / f"{command}.py").read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(package) for name in top)


@pytest.mark.parametrize("name", ["frozen_a", "peft", "gguf"])
def test_an_export_needs_numpy_safetensors_and_gguf_only(name):
    others = {
        found
        for found in imports(ROOT / "server" / "registry" / "exports" / f"{name}.py")
        if found.startswith("server.")
    }
    # The table of llama.cpp's names, which reads bases, too. It imports the table of architectures and `shared`.
    own = ("server.registry.exports", "server.compiler.checkpoints.gguf_names")
    assert all(found.startswith(own) for found in others)
    foreign = tops(ROOT / "server" / "registry" / "exports" / f"{name}.py") - {
        "server",
        "shared",
        *sys.stdlib_module_names,
    }
    assert foreign <= {"numpy", "safetensors", "gguf"}


def test_executorch_is_touched_in_two_places_only():
    for path in (file for package in PACKAGES for file in modules(package)):
        if not is_under(path, "server/compiler", "device_agent/executors"):
            assert "executorch" not in tops(path), path
            assert "torch" not in tops(path) or is_under(path, "server/inference"), path


@pytest.mark.parametrize(
    ("modules", "foreign"),
    [
        (("daemon.daemon", "training.run", "executors.choice", "inference.samples", "cli.main"), FOREIGN | WEB),
        (("serving.http",), FOREIGN),
    ],
)
def test_an_agent_imports_no_torch_to_train_and_to_infer(modules, foreign):
    """Importing it would use hundreds of megabytes in the daemon; Python executors are processes of their own."""
    script = "".join(f"import device_agent.{name}\n" for name in modules)
    script += f"import sys; print(sorted({foreign!r} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_device_imports_its_web_server_in_serving_only():
    users = {path.parent for path in modules("device_agent") if WEB & tops(path)}
    assert users == {ROOT / "device_agent" / "serving"}


def test_the_http_library_is_imported_in_one_module():
    users = [path for package in PACKAGES for path in modules(package) if "httpx" in tops(path)]
    assert users == [ROOT / "shared" / "transport.py"]
