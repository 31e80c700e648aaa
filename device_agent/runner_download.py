"""Fetching the native runner that the server's operator published for this platform, signed by the server.

Knows nothing of building.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.client import DeviceClient
from device_agent.errors import NoRunner
from device_agent.runner_archive import unpack_runner
from device_agent.runner_place import EXECUTORCH, RunnerPlace, check_starts, never
from device_agent.runner_tools import Report
from shared.errors import NotFound, Untrusted
from shared.protocol import RunnerBuild
from shared.signing import verify_runner


def download_runner(
    client: DeviceClient,
    key: Ed25519PublicKey,
    place: RunnerPlace,
    report: Report,
    stop: Callable[[], bool] = never,
) -> Path:
    """Downloads the runner for the place's platform and puts it there; the directory.

    key: the server's, pinned when this device enrolled. Raises NoRunner if the server has none that fits or it does not
    start here, Untrusted if the signature, the hash or the archive's content is wrong, Unavailable if the server is
    away.
    """
    with place.lock(stop):
        return download_locked(client, key, place, report)


def download_locked(client: DeviceClient, key: Ed25519PublicKey, place: RunnerPlace, report: Report) -> Path:
    """As `download_runner`, by who holds the place's lock."""
    build = _offered(client, key, place)
    if reason := place.remembered(build.sha256):
        raise NoRunner(f"the server's runner was tried before: {reason}")
    report(f"downloading the runner for {build.platform} ({build.size / 1e6:.0f} MB)")
    archive = place.directory / f"{build.sha256}.tar.gz"  # not aside: an interrupted download resumes
    client.download_runner(build, archive)
    try:
        with place.aside() as aside:
            made = aside / "made"
            unpack_runner(archive, made)
            if place.native:
                check_starts(made)
            return place.put(made)
    except (Untrusted, NoRunner) as error:
        # These bytes are signed and will be the same next time.
        place.remember(build.sha256, error.detail, None)
        raise
    finally:
        archive.unlink(missing_ok=True)


def _offered(client: DeviceClient, key: Ed25519PublicKey, place: RunnerPlace) -> RunnerBuild:
    try:
        build = verify_runner(client.runner(place.system), key)
    except NotFound as error:
        raise NoRunner(
            f"the server has no runner for {place.system}; its operator can add one with `mobizo-server runners add`"
        ) from error
    if build.platform != place.system:
        raise Untrusted(f"the server sent a runner for {build.platform} where {place.system} was asked for")
    wanted = (version("mobizo"), EXECUTORCH)
    if (build.version, build.executorch) != wanted:
        raise NoRunner(
            f"the server's runner for {build.platform} is of mobizo {build.version} and ExecuTorch {build.executorch}; "
            f"this agent wants mobizo {wanted[0]} and ExecuTorch {wanted[1]}: its operator can add that one"
        )
    return build
