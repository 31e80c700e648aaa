"""Finds the native runner: the directory in $MOBIZO_AGENT_RUNNER, or the bundle of an installed package.

`mobizo-runner` has the runner for this machine, `mobizo-runner-phone` one for aarch64 phones (deploy/runner_wheel.py).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from device_agent.errors import NoRunner

EXECUTORCH = "1.5.1"  # the release that the runner is built against
PROGRAM = "mobizo-runner"
RUNNER_VARIABLE = "MOBIZO_AGENT_RUNNER"  # a directory with a runner made elsewhere
PACKAGE, PHONE_PACKAGE = "mobizo-runner", "mobizo-runner-phone"
PACKAGED_MACHINES = ("x86_64", "aarch64")
START_SECONDS = 60.0  # for `mobizo-runner version`, on a slow and busy device


def host_platform() -> str:
    """Returns this machine's platform, such as linux-x86_64."""
    return f"{platform.system()}-{platform.machine()}".lower()


def find_runner(system: str | None = None) -> Path:
    """Returns the directory of the native runner for a platform: `mobizo-runner` with its libraries.

    system: such as linux-aarch64 or android-arm64; default: this machine's, where the runner is also started once.
    Raises NoRunner if there is none, it lacks files, it is of another version, or it does not start on this machine.
    """
    system = system or host_platform()
    kernel, _, machine = system.replace("arm64", "aarch64").partition("-")
    override = os.environ.get(RUNNER_VARIABLE)
    if override and not (Path(override) / PROGRAM).is_file():
        raise NoRunner(f"${RUNNER_VARIABLE} is {override}, which holds no {PROGRAM}; correct or unset it")
    directory = Path(override) if override else _packaged_runner(system, kernel, machine)
    if system == host_platform():
        _check_starts(directory, (directory / PROGRAM).stat().st_mtime_ns)
    return directory


def _packaged_runner(system: str, kernel: str, machine: str) -> Path:
    """Returns the complete bundle of the installed package for a platform. Raises NoRunner."""
    if kernel not in ("linux", "android") or machine not in PACKAGED_MACHINES:
        raise NoRunner(
            f"there is no package with a runner for {system}; build one (docs/runner.md) and name its directory in "
            f"${RUNNER_VARIABLE}"
        )
    name, wanted = PACKAGE if host_platform() == f"linux-{machine}" else PHONE_PACKAGE, version("mobizo")
    remedy = f"`pip install --force-reinstall --no-deps --find-links DIRECTORY {name}=={wanted}` installs it"
    try:
        package = distribution(name)
    except PackageNotFoundError as error:
        raise NoRunner(
            f"the native runner for {system} is not installed: it is in the package {name}; {remedy} from the "
            "release's directory of wheels"
        ) from error
    if package.version != wanted:
        raise NoRunner(f"{name} has version {package.version} and this agent has version {wanted}; {remedy}")
    bundle = Path(str(package.locate_file(f"{name.replace('-', '_')}/bundle")))
    files = [Path(str(file.locate())) for file in package.files or ()]
    missing = [path for path in (bundle / PROGRAM, *files) if path.is_relative_to(bundle) and not path.is_file()]
    if missing:
        raise NoRunner(f"{name} lacks {missing[0]}; {remedy} again")
    return bundle


@lru_cache
def _check_starts(directory: Path, _modified: int) -> None:
    """Raises NoRunner unless the runner in `directory` starts here and has this agent's version.

    _modified: the program's mtime, so that a replaced program is checked again.
    """
    try:
        result = subprocess.run(
            [directory / PROGRAM, "version"], capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        remedy = f"install {PACKAGE} for its processor, or correct ${RUNNER_VARIABLE}"
        raise NoRunner(f"the runner in {directory} does not start on this device: {error}; {remedy}") from error
    if result.returncode != 0:
        raise NoRunner(f"the runner in {directory} does not start on this device: {result.stderr.strip()[-300:]}")
    try:
        facts = json.loads(result.stdout)
        versions = (facts["version"], facts["executorch"])
    except (ValueError, KeyError, TypeError) as error:
        raise NoRunner(f"{directory / PROGRAM} answers {result.stdout.strip()[:100]!r} instead of a version") from error
    if versions != (version("mobizo"), EXECUTORCH):
        raise NoRunner(
            f"the runner in {directory} is of mobizo {versions[0]} and ExecuTorch {versions[1]}; this agent is of "
            f"mobizo {version('mobizo')} and needs ExecuTorch {EXECUTORCH}; install that version of {PACKAGE}"
        )
