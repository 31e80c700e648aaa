"""Builds the wheels of the native runner, whose packages hold bundles (device_agent/runner/bundle.cmake).

    python deploy/runner_wheel.py DIRECTORY [--machine x86_64] [--machine aarch64]

Needs Debian or Ubuntu, a C++17 compiler, and CMake, Ninja, wheel and ExecuTorch in the environment of this Python. On
x86_64, Debian's g++-aarch64-linux-gnu builds for aarch64 too, against ExecuTorch's wheel, which pip downloads. The
aarch64 bundle is also packed as mobizo-runner-phone, a wheel for any machine that drives a phone.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "device_agent" / "runner"
BUILD = ROOT / "build" / "runner"  # kept, so that later builds compile only what changed
MACHINES = ("x86_64", "aarch64")
CROSS_COMPILER = "aarch64-linux-gnu-g++"  # as aarch64-linux.cmake names it
CROSS_EXECUTORCH = "executorch==1.5.1 --hash=sha256:8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a\n"
LICENSE = "MIT AND BSD-3-Clause AND Apache-2.0 AND LGPL-2.1-or-later AND GPL-3.0-or-later WITH GCC-exception-3.1"
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: The native runner for Linux on {machine}, with all libraries that it needs
License-Expression: {license}
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: mobizo\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
PACKAGE = '"""The native runner for Linux on {machine}: `bundle/mobizo-runner`."""\n'


def main() -> None:
    """Builds the wheels for the given machines, by default for all that this one can compile for."""
    parser = argparse.ArgumentParser(description="Build the wheels of the native runner.")
    parser.add_argument("directory", type=Path, help="where the wheels are written")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: each that has a compiler here")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    native = platform.machine()
    if platform.system() != "Linux" or native not in MACHINES:
        sys.exit(f"the runner is built on Linux on {' or '.join(MACHINES)}, not on {platform.system()} on {native}")
    for machine in arguments.machine or MACHINES:
        missing = missing_tool(machine)
        if missing is None:
            tree = build(machine)
            write_wheel("mobizo-runner", tree, machine, f"py3-none-manylinux_2_28_{machine}", arguments.directory)
            if machine == "aarch64":
                write_wheel("mobizo-runner-phone", tree, machine, "py3-none-any", arguments.directory)
        elif arguments.machine or machine == native:
            sys.exit(missing)
        else:
            sys.stdout.write(f"{missing}; its wheels are left out\n")


def missing_tool(machine: str) -> str | None:
    """Returns why the runner for a machine cannot be built here, and the remedy; None if it can."""
    if machine != platform.machine():
        if machine != "aarch64":
            return f"the runner for {machine} is built on {machine}"
        if shutil.which(CROSS_COMPILER) is None:
            return f"the runner for aarch64 needs {CROSS_COMPILER}: apt install g++-aarch64-linux-gnu"
    elif not any(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "g++", "clang++"))):
        return "the runner needs a C++17 compiler: apt install g++"
    if shutil.which("dpkg-query") is None:
        return "the runner is built on Debian or Ubuntu, whose C and C++ libraries and licences it carries"
    return None


def build(machine: str) -> Path:
    """Compiles the runner for a machine and returns the directory with its bundle."""
    build_directory, tree = BUILD / machine / "cmake", BUILD / machine / "tree"
    options = [f"-DMOBIZO_VERSION={version()}", "-DMOBIZO_BUNDLE=ON", "-DCMAKE_INSTALL_MESSAGE=NEVER"]
    if machine == platform.machine():
        options.append(f"-DEXECUTORCH_ROOT={installed_executorch()}")
    else:
        options.append(f"-DEXECUTORCH_ROOT={downloaded_executorch(BUILD / machine)}")
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={SOURCES / 'aarch64-linux.cmake'}")
    run("cmake", "-S", SOURCES, "-B", build_directory, "-G", "Ninja", *options)
    run("cmake", "--build", build_directory)
    shutil.rmtree(tree, ignore_errors=True)
    run("cmake", "--install", build_directory, "--prefix", tree, "--strip")
    return tree


def installed_executorch() -> Path:
    """Returns the directory of the installed `executorch` package, without importing it."""
    spec = find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the runner is built against the executorch package, which is not installed: `make setup` installs it")
    return Path(spec.submodule_search_locations[0])


def downloaded_executorch(directory: Path) -> Path:
    """Returns the directory of ExecuTorch's package for aarch64, which is downloaded once into `directory`."""
    unpacked = directory / "packages"
    if not unpacked.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        requirements = directory / "requirements.txt"
        requirements.write_text(CROSS_EXECUTORCH)
        target = ["--platform", "manylinux_2_28_aarch64", "--python-version", "3.11", "--only-binary", ":all:"]
        where = ["--no-deps", "--require-hashes", "--requirement", requirements, "--dest", directory]
        run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *target, *where)
        (downloaded,) = directory.glob("executorch-*.whl")
        with zipfile.ZipFile(downloaded) as archive:
            archive.extractall(directory / "unpacking")
        (directory / "unpacking").rename(unpacked)
    return unpacked / "executorch"


def write_wheel(name: str, tree: Path, machine: str, tag: str, directory: Path) -> None:
    """Writes the wheel of distribution `name`, whose package is the bundle in `tree`."""
    root, package = BUILD / machine / name, name.replace("-", "_")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(tree, root / package / "bundle")
    (root / package / "__init__.py").write_text(PACKAGE.format(machine=machine))
    described = root / f"{package}-{version()}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(METADATA.format(name=name, version=version(), machine=machine, license=LICENSE))
    (described / "WHEEL").write_text(WHEEL.format(pure=str(tag.endswith("any")).lower(), tag=tag))
    run(sys.executable, "-m", "wheel", "pack", root, "--dest-dir", directory)


def version() -> str:
    """Returns the version of mobizo, which its runner shares."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def run(*command: str | Path) -> None:
    """Runs a command with the programs of this Python's environment before those of the machine; exits if it fails."""
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        sys.exit(f"{Path(command[0]).name} failed with exit status {status}; its output is above")


if __name__ == "__main__":
    main()
