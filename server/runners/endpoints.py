"""Routes of runner builds. They are the same for devices of every tenant."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.auth.guard import Device
from server.http.place import Here, Reading
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from server.runners.service import RunnerService
from shared.protocol import SignedRunner

router = Routes(prefix="/v1/runners", tags=["runners"])
Platform = Annotated[str, Path(pattern=r"^[a-z0-9]+-[a-z0-9_]+$", max_length=100, description="such as linux-aarch64")]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="sha256, hexadecimal")]


@router.get("/{platform}")
def runner(principal: Device, platform: Platform, session: Reading) -> SignedRunner:
    """The native runner's build for a platform, signed."""
    return RunnerService(session).signed(platform)


@router.head("/{platform}/{sha256}", include_in_schema=False)
@router.get("/{platform}/{sha256}", **FILE_ROUTE)
def archive(
    principal: Device, platform: Platform, sha256: Digest, request: Request, here: Here, session: Reading
) -> Response:
    """That build's .tar.gz; takes Range."""
    RunnerService(session).check(platform, sha256)
    return file_response(request, here.artifacts, sha256, f"mobizo-runner-{platform}.tar.gz")
