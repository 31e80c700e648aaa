"""Routes of trajectories, and of B as it was after any step."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.adapters.endpoints import ABSENT, FILE_OF_ADAPTER, Reader, Version
from server.adapters.resolution import resolve
from server.history.remaking import StepService
from server.history.service import HistoryService
from server.http.openapi import raises
from server.http.place import Here, Reading
from server.http.ranges import file_response
from server.http.routes import Routes
from shared.errors import NotReplayable
from shared.protocol import TrajectoryView

router = Routes(prefix="/v1/adapters/{name}/versions/{version}", tags=["history"])
Step = Annotated[int, Path(ge=0, le=2**31 - 1)]
STEP_ROUTE = FILE_OF_ADAPTER | {"responses": FILE_OF_ADAPTER["responses"] | raises(NotReplayable)}


@router.get("/trajectory", responses=raises(*ABSENT))
def trajectory(principal: Reader, name: str, version: Version, session: Reading) -> TrajectoryView:
    """The trajectory that came with a version; 404 if none did."""
    return HistoryService(session).view(principal.tenant, name, version)


@router.head("/trajectory.bin", include_in_schema=False)
@router.get("/trajectory.bin", **FILE_OF_ADAPTER)
def trajectory_file(
    principal: Reader, name: str, version: Version, request: Request, here: Here, session: Reading
) -> Response:
    """The same as the device sent it; takes Range."""
    found = HistoryService(session).view(principal.tenant, name, version)
    return file_response(request, here.artifacts, found.sha256, f"{name}-{version}.trajectory.bin")


@router.head("/steps/{step}/lora_B.safetensors", include_in_schema=False)
@router.get("/steps/{step}/lora_B.safetensors", **STEP_ROUTE)
def step_file(principal: Reader, name: str, version: Version, step: Step, request: Request, here: Here) -> Response:
    """LoRA-B as it was after that many steps of a verified run, made by replay; takes Range."""
    with here.database.reading() as session:
        adapter, stored = resolve(session, principal.tenant, name, f"v{version}")
        session.expunge_all()
    sha256 = StepService(here.database, here.artifacts).file(principal.tenant, adapter, stored, step)
    return file_response(request, here.artifacts, sha256, f"{name}-{version}.step-{step}.lora_B.safetensors")
