"""The native runner is built from its sources: what it links, what stays, and what is said when it cannot be."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from device_agent.errors import NoRunner
from device_agent.runner.build import Options, Stopped, build_runner
from device_agent.runner.location import EXECUTORCH, SOURCES, RunnerLocation
from device_agent.runner.supply import build_runner_command, ensure_runner
from device_agent.runner.toolchain import (
    CMAKE_WHEEL,
    EXECUTORCH_WHEEL,
    NINJA_WHEEL,
    fetch_wheel,
    find_cmake,
    installed_executorch,
)
from shared.errors import BadRequest, Untrusted
from tests.device_agent.conftest import ROOT
from tests.device_agent.native import tools_on_path

LIBRARIES = {
    "libexecutorch.so",
    "libexecutorch_backend_xnnpack.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_threadpool.so",
}
# Sources that a build is done with in a moment: a script that says its version, made while a file named hold is away.
SCRIPT = """cmake_minimum_required(VERSION 3.28)
project(standin LANGUAGES NONE)
find_package(executorch {package} CONFIG PATHS ${{EXECUTORCH_ROOT}} NO_DEFAULT_PATH)
add_custom_target(made ALL COMMAND sh {notes}/work.sh)
file(WRITE ${{CMAKE_BINARY_DIR}}/mobizo-runner
  "#!/bin/sh\\necho '{{\\"version\\": \\"${{MOBIZO_VERSION}}\\", \\"executorch\\": \\"{executorch}\\"}}'\\n")
file(WRITE ${{CMAKE_BINARY_DIR}}/libseen.so "${{EXECUTORCH_ROOT}} ${{SEEN_TOOLCHAIN}}${{ANDROID_ABI}}")
install(PROGRAMS ${{CMAKE_BINARY_DIR}}/mobizo-runner DESTINATION .)
install(FILES ${{CMAKE_BINARY_DIR}}/libseen.so DESTINATION lib)
"""
WORK = """echo $$ >> {notes}/made
while [ -e {notes}/hold ]; do sleep 0.05; done
"""
ENSURE = """
import sys
from pathlib import Path
from device_agent.runner.location import RunnerLocation
from device_agent.runner.supply import ensure_runner
supply = ensure_runner(RunnerLocation(Path(sys.argv[1]), None, Path(sys.argv[2])), None, None, lambda line: None)
print(supply.directory or supply.reason)
"""


def write_sources(directory, executorch=EXECUTORCH, package="REQUIRED"):
    directory.mkdir(exist_ok=True)
    text = SCRIPT.format(notes=directory.parent, executorch=executorch, package=package)
    (directory / "CMakeLists.txt").write_text(text)
    (directory.parent / "work.sh").write_text(WORK.format(notes=directory.parent))
    return directory


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    tools_on_path(monkeypatch)


@pytest.fixture
def place(tmp_path):
    return RunnerLocation(tmp_path / "runners", None, write_sources(tmp_path / "sources"))


def discard_line(_line):
    pass


def ensure(place):
    return ensure_runner(place, None, None, discard_line)


@pytest.fixture
def start_ensuring(place, tmp_path):
    """Starts processes of their own that ensure the runner, whose work goes on while there is a file named hold."""
    processes = []

    def start():
        command = [sys.executable, "-c", ENSURE, str(place.directory.parent), str(place.sources)]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    (tmp_path / "hold").touch()
    yield start
    (tmp_path / "hold").unlink(missing_ok=True)
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(path, there=True, seconds=60):
    """Until a path is there, or gone."""
    end = time.monotonic() + seconds
    while path.exists() != there:
        assert time.monotonic() < end, f"{path} did not {'come' if there else 'go'}"
        time.sleep(0.02)


def makings(tmp_path):
    """How many builds ran."""
    return len((tmp_path / "made").read_text().splitlines())


def left_aside(place):
    return list(place.directory.glob("aside-*"))


def test_the_runner_starts_wherever_it_is_moved(runner_directory, tmp_path):
    moved = tmp_path / "elsewhere" / "runner"
    shutil.copytree(runner_directory, moved)
    process = subprocess.run([moved / "mobizo-runner", "version"], capture_output=True, text=True, check=True, env={})
    facts = json.loads(process.stdout)
    assert (facts["version"], facts["executorch"]) == (version("mobizo"), EXECUTORCH)


def test_the_runner_links_neither_torch_nor_python_and_its_own_libraries_only(runner_directory):
    process = subprocess.run(
        ["ldd", runner_directory / "mobizo-runner"], capture_output=True, text=True, check=True, env={}
    )
    libraries = dict(line.split("=>") for line in process.stdout.splitlines() if "=>" in line)
    libraries = {name.strip(): path.split()[0] for name, path in libraries.items()}
    assert not [name for name in libraries if "torch" in name.removeprefix("libexecutorch") or "python" in name]
    ours = {name: path for name, path in libraries.items() if name.startswith("libexecutorch")}
    assert ours == {name: str(runner_directory / "lib" / name) for name in LIBRARIES}


def test_the_fuzzers_double_of_the_program_fits_the_runners_headers():
    """The fuzzer itself is built by slow tests only."""
    compiler = next(filter(shutil.which, ("g++", "clang++")), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    options = ["-std=c++17", "-fsyntax-only", f"-I{SOURCES}", '-DMOBIZO_VERSION="fuzz"', '-DEXECUTORCH_BUILD="none"']
    fuzz = Path(__file__).parent / "fuzz"
    subprocess.run([compiler, *options, fuzz / "fake_program.cpp", fuzz / "entry.cpp"], check=True)


def test_it_is_built_against_the_installed_package_then_found(place):
    supply = ensure(place)
    assert supply.directory == place.path == place.find()
    executorch_root, _ = (place.path / "lib" / "libseen.so").read_text().split(" ")
    assert Path(executorch_root) == installed_executorch(EXECUTORCH).resolve()
    assert not left_aside(place)


def test_other_sources_take_the_place_of_what_was_built_before(place, tmp_path):
    before = build_runner(place, discard_line)
    with (place.sources / "more.cpp").open("w") as file:
        file.write("// a change")
    changed = RunnerLocation(tmp_path / "runners", None, shutil.copytree(place.sources, tmp_path / "changed"))
    assert changed.find() is None
    assert build_runner(changed, discard_line) != before
    assert not before.exists()


def test_a_runner_that_no_longer_starts_is_made_anew(place, tmp_path):
    (build_runner(place, discard_line) / "mobizo-runner").write_text("")
    assert RunnerLocation(tmp_path / "runners", None, place.sources).find() is None
    assert ensure(place).directory == place.path
    assert makings(tmp_path) == 2


def test_sources_that_do_not_build_are_tried_once_and_their_error_is_told(place, tmp_path):
    (place.sources / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.28)\nproject(bad LANGUAGES CXX)\nadd_executable(mobizo-runner main.cpp)\n"
    )
    (place.sources / "main.cpp").write_text("int main() { return no_such_name; }\n")
    broken = RunnerLocation(tmp_path / "runners", None, shutil.copytree(place.sources, tmp_path / "broken"))
    reason = ensure(broken).reason
    assert "no_such_name" in reason
    assert str(broken.log) in reason
    broken.log.unlink()
    assert "no_such_name" in ensure(broken).reason
    assert not broken.log.exists(), "it was built again"
    with pytest.raises(NoRunner, match="no_such_name"):
        build_runner(broken, discard_line)


def test_without_compiler_the_way_out_is_named_and_looked_for_anew(place, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    path = os.environ["PATH"]
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    supply = ensure(place)
    assert supply.directory is None
    assert "apt install g++" in supply.reason
    assert "mobizo-server runner-build add" in supply.reason
    phone = ensure(RunnerLocation(tmp_path / "runners", "android-arm64", place.sources)).reason
    assert "apt install g++-aarch64-linux-gnu" in phone
    assert "make runner-aarch64" in phone
    monkeypatch.setenv("PATH", path)
    assert ensure(place).directory == place.path


def test_a_cross_build_uses_the_toolchain_and_the_given_executorch(tmp_path, monkeypatch):
    toolchain = tmp_path / "toolchain.cmake"
    toolchain.write_text("set(SEEN_TOOLCHAIN ndk-)\n")
    root = tmp_path / "ndk-executorch"
    root.mkdir()
    place = RunnerLocation(
        tmp_path / "runners", "android-arm64", write_sources(tmp_path / "sources", "of the phone", package="")
    )
    built = build_runner(place, discard_line, Options(root, toolchain))
    assert (built / "lib" / "libseen.so").read_text() == f"{root} ndk-arm64-v8a"
    assert RunnerLocation(tmp_path / "runners", "android-arm64", place.sources).find() == built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"toolchain": Path("no-such.cmake"), "system": "android-arm64"}, "no such file"),
        ({"toolchain": ROOT / "pyproject.toml", "system": None}, "--platform"),
        ({"executorch_root": Path("/no/such"), "system": "android-arm64"}, "no such file"),
        ({"system": "../../etc"}, "--platform"),
    ],
)
def test_the_commands_options_are_checked(tmp_path, options, message):
    arguments = {"executorch_root": None, "toolchain": None, "archive": None, "json_lines": False} | options
    with pytest.raises(BadRequest, match=message):
        build_runner_command(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cmake_version", "usable"), [("3.25.1", False), ("3.27.9", False), ("3.28.0", True), ("4.0.1", True)]
)
def test_a_cmake_that_is_too_old_is_not_used(tmp_path, monkeypatch, cmake_version, usable):
    program = write_cmake(tmp_path, cmake_version)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_cmake() == (program if usable else None)


def test_a_build_killed_midway_leaves_nothing_that_is_found(place, tmp_path, start_ensuring):
    process = start_ensuring()
    wait_for(tmp_path / "made")
    process.kill()
    process.wait()
    assert place.find() is None
    assert left_aside(place)
    (tmp_path / "hold").unlink()
    assert ensure(place).directory == place.path
    assert makings(tmp_path) == 2
    assert not left_aside(place)


def test_of_two_processes_one_builds_and_both_have_it(place, tmp_path, start_ensuring):
    first = start_ensuring()
    wait_for(tmp_path / "made")
    second = start_ensuring()
    with pytest.raises(subprocess.TimeoutExpired):
        second.communicate(timeout=1.5)
    (tmp_path / "hold").unlink()
    assert [process.communicate(timeout=60)[0].strip() for process in (first, second)] == [str(place.path)] * 2
    assert makings(tmp_path) == 1


def test_a_build_is_stopped_with_all_that_it_started_and_begins_anew(place, tmp_path):
    (tmp_path / "hold").touch()
    with pytest.raises(Stopped):
        build_runner(place, discard_line, stop=(tmp_path / "made").exists)
    builder = int((tmp_path / "made").read_text())
    wait_for(Path(f"/proc/{builder}/cwd"), there=False)
    (tmp_path / "hold").unlink()
    assert ensure(place).directory == place.path


def write_wheel(directory, wheel):
    """A wheel of the right name that is not the one that was published."""
    directory.mkdir()
    path = directory / f"{wheel.name}-{wheel.version}-py3-none-any.whl"
    described = f"{wheel.name}-{wheel.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{described}/METADATA", f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n"
        )
        archive.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{described}/RECORD", "")
        archive.writestr(wheel.prefixes[0].rstrip("/") + "/evil", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The only place where pip looks."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def run(command):
    return subprocess.run([*command], capture_output=True, check=False).returncode


@pytest.mark.parametrize("wheel", [EXECUTORCH_WHEEL, CMAKE_WHEEL, NINJA_WHEEL], ids=lambda wheel: wheel.name)
def test_a_wheel_that_is_not_the_pinned_one_is_refused(wheel, index, tmp_path):
    write_wheel(index, wheel)
    target = tmp_path / "private"
    target.mkdir()
    with pytest.raises(Untrusted, match=f"{wheel.name} {wheel.version}"):
        fetch_wheel(wheel, target, run, discard_line)
    assert not list(target.rglob("evil"))


def write_cmake(directory, cmake_version):
    directory.mkdir(exist_ok=True)
    program = directory / "cmake"
    program.write_text(f"#!/bin/sh\necho 'cmake version {cmake_version}'\n")
    program.chmod(0o755)
    return program


def test_a_failure_counts_for_its_time_only_and_never_longer_for_a_clock_set_back(place, monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    place.remember("build", "no network", 3600)
    place.remember("archive", "does not start", None)
    for passed, expected in ((0, True), (3599, True), (3601, False), (-10, False)):
        now = 1_000_000.0 + passed
        assert (place.remembered("build") is not None) is expected
        assert place.remembered("archive") == "does not start"
    assert place.remembered("other") is None
    (place.directory / "failed.json").write_text("damaged")
    assert place.remembered("archive") is None
