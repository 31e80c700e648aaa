"""Downloads the native runner that the server offers for this platform, signed by the server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.errors import NoRunner
from device_agent.protocol.client import DeviceClient
from device_agent.runner.archive import unpack_runner
from device_agent.runner.location import EXECUTORCH, RunnerLocation, check_machine, check_starts, never
from device_agent.runner.toolchain import Report
from shared.catalog import RunnerBuild
from shared.errors import NotFound, Untrusted
from shared.signing import verify_runner_build


def download_runner(
    client: DeviceClient,
    key: Ed25519PublicKey,
    location: RunnerLocation,
    report: Report,
    stop: Callable[[], bool] = never,
) -> Path:
    """Downloads and installs the runner; returns its directory.

    key: the server's pinned key. Raises NoRunner if the server has none that fits or it does not start, Untrusted if
    signature, hash or content is invalid, Unavailable if the server does not answer.
    """
    with location.lock(stop):
        return download_locked(client, key, location, report)


def download_locked(client: DeviceClient, key: Ed25519PublicKey, location: RunnerLocation, report: Report) -> Path:
    """Like `download_runner`; the caller holds the location's lock."""
    build = _offered(client, key, location)
    if reason := location.remembered(build.sha256):
        raise NoRunner(f"the server's runner was tried before: {reason}")
    report(f"downloading the runner for {build.platform} ({build.size / 1e6:.0f} MB)")
    archive = location.directory / f"{build.sha256}.tar.gz"  # not in staging: an interrupted download resumes
    client.download_runner(build, archive)
    try:
        with location.staging_directory() as staging:
            unpacked = staging / "made"
            unpack_runner(archive, unpacked)
            check_machine(unpacked, location.system)
            if location.native:
                check_starts(unpacked)
            return location.put(unpacked)
    except (Untrusted, NoRunner) as error:
        # These bytes are signed and will be the same next time.
        location.remember(build.sha256, error.detail, None)
        raise
    finally:
        archive.unlink(missing_ok=True)


def _offered(client: DeviceClient, key: Ed25519PublicKey, location: RunnerLocation) -> RunnerBuild:
    try:
        build = verify_runner_build(client.runner(location.system), key)
    except NotFound as error:
        raise NoRunner(
            f"the server has no runner for {location.system}; add one there with `mobizo-server runner-build add`"
        ) from error
    if build.platform != location.system:
        raise Untrusted(f"the server sent a runner for {build.platform} where {location.system} was asked for")
    own_version = version("mobizo")
    if (build.version, build.executorch) != (own_version, EXECUTORCH):
        raise NoRunner(
            f"the server's runner for {build.platform} is of mobizo {build.version} and ExecuTorch {build.executorch}; "
            f"this agent wants mobizo {own_version} and ExecuTorch {EXECUTORCH}: its operator can add that one"
        )
    return build
