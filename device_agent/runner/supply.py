"""Obtains the native runner: an installed one, a download from the server, or a local build."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.protocol.client import DeviceClient
from device_agent.runner.archive import pack_runner
from device_agent.runner.build import (
    BUNDLED,
    Options,
    Stopped,
    build_locked,
    build_runner,
    check_options,
    directory_bytes,
)
from device_agent.runner.download import download_locked
from device_agent.runner.location import EXECUTORCH, RunnerLocation, never
from device_agent.runner.toolchain import Report
from shared.errors import BadRequest, MobizoError, Unavailable

PLATFORM = r"[a-z0-9]+-[a-z0-9_]+"
BUILD_AGAIN_SECONDS = 3600.0  # after a build that lacked the network or disk space


@dataclass(frozen=True)
class RunnerResult:
    """The directory of a ready runner, or why there is none."""

    directory: Path | None
    reason: str = ""


def ensure_runner(
    location: RunnerLocation,
    client: DeviceClient | None,
    key: Ed25519PublicKey | None,
    report: Report,
    stop: Callable[[], bool] = never,
) -> RunnerResult:
    """Returns the runner, downloading or building it if necessary.

    key: the server's pinned key. A failed build is not repeated until the sources or versions change, `mobizo-agent
    build-runner` succeeds, or, after a network failure, an hour has passed.
    """
    if directory := location.find():
        return RunnerResult(directory)
    try:
        with location.lock(stop):
            # Whoever held the lock may have made it.
            return (
                RunnerResult(directory) if (directory := location.find()) else _get(location, client, key, report, stop)
            )
    except MobizoError as error:
        return RunnerResult(None, error.detail)
    except OSError as error:
        return RunnerResult(None, f"{location.directory} cannot be used: {error}")


def _get(
    location: RunnerLocation,
    client: DeviceClient | None,
    key: Ed25519PublicKey | None,
    report: Report,
    stop: Callable[[], bool],
) -> RunnerResult:
    reasons = []
    if client is not None and key is not None:
        try:
            return RunnerResult(download_locked(client, key, location, report))
        except MobizoError as error:
            reasons.append(error.detail)
    try:
        return RunnerResult(_build_once(location, report, stop))
    except MobizoError as error:
        reasons.append(error.detail)
    return RunnerResult(None, "; ".join(reasons))


def _build_once(location: RunnerLocation, report: Report, stop: Callable[[], bool]) -> Path:
    """Builds unless that failed before. Tools on PATH are checked every time."""
    check_options(location, Options())
    if reason := location.remembered(location.path.name):
        raise Unavailable(f"the last build failed: {reason}")
    try:
        return build_locked(location, report, Options(), stop)
    except Stopped:
        raise
    except MobizoError as error:
        seconds = BUILD_AGAIN_SECONDS if isinstance(error, Unavailable) else None
        location.remember(location.path.name, error.detail, seconds)
        raise


def build_runner_command(
    home: Path,
    executorch_root: Path | None,
    toolchain: Path | None,
    system: str | None,
    archive: Path | None,
    json_lines: bool,
) -> None:
    """Implements `mobizo-agent build-runner`: builds the runner regardless of earlier failures and prints its
    directory.

    home: the agent's. system: the target platform; None for this machine. archive: where to write the runner as an
    archive, whose directory is made. Raises like `build_runner`, and BadRequest
    for options that exclude each other.
    """
    if system is not None and not re.fullmatch(PLATFORM, system):
        raise BadRequest(f"--platform {system!r} must be system and machine, such as android-arm64")
    location = RunnerLocation.within(home, system)
    if toolchain is not None and location.native:
        raise BadRequest("--toolchain builds for another platform: name it with --platform, such as android-arm64")
    for option, path in (("--executorch-root", executorch_root), ("--toolchain", toolchain)):
        if path is not None and not path.exists():
            raise BadRequest(f"{option} {path}: there is no such file or directory")

    def report(line: str) -> None:
        typer.echo(json.dumps({"progress": line}) if json_lines else line)

    began = time.monotonic()
    options = Options(executorch_root, toolchain)
    directory = build_runner(location, report, options)
    seconds, size = time.monotonic() - began, directory_bytes(directory)
    if archive is not None:
        archive.parent.mkdir(parents=True, exist_ok=True)
        pack_runner(directory, archive)
    if json_lines:
        facts = {"runner": str(directory), "platform": location.system, "bytes": size, "seconds": round(seconds, 1)}
        typer.echo(json.dumps(facts | ({"archive": str(archive)} if archive is not None else {})))
        return
    typer.echo(f"built for {location.system} in {seconds:.0f} s: {directory} ({size / 1e6:.1f} MB)")
    if archive is not None:
        systems = BUNDLED if options.bundles(location) else (location.system,)
        flags = " ".join(f"--platform {system}" for system in systems)
        flags += f" --version {version('mobizo')} --executorch {EXECUTORCH}"
        typer.echo(f"offer it to devices with: mobizo-server runner-build add {archive} {flags}")
