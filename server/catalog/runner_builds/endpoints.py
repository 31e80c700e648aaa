"""Routes of runner builds. They are the same for devices of every tenant."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.catalog.runner_builds.service import RunnerBuildService
from server.identity.access_rules import Device
from server.web.downloads import FILE_ROUTE, file_response
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.catalog import SignedRunnerBuild

router = Routes(prefix="/v1/runner-builds", tags=["runner-builds"])
Platform = Annotated[str, Path(pattern=r"^[a-z0-9]+-[a-z0-9_]+$", max_length=100, description="such as linux-aarch64")]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="sha256, hexadecimal")]


@router.get("/{platform}")
def runner(principal: Device, platform: Platform, session: Reading) -> SignedRunnerBuild:
    """The native runner's build for a platform, signed."""
    return RunnerBuildService(session).signed(platform)


@router.head("/{platform}/{sha256}", include_in_schema=False)
@router.get("/{platform}/{sha256}", **FILE_ROUTE)
def archive(
    principal: Device, platform: Platform, sha256: Digest, request: Request, state: State, session: Reading
) -> Response:
    """That build's .tar.gz; takes Range."""
    RunnerBuildService(session).check(platform, sha256)
    return file_response(request, state.artifacts, sha256, f"mobizo-runner-{platform}.tar.gz")
