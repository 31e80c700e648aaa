"""Routes of trajectories, and of B after any step."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.registry.endpoints import ABSENT, FILE_OF_ADAPTER, Reader, Version
from server.registry.repository import resolve
from server.registry.trajectories.reconstruction import StepService
from server.registry.trajectories.service import TrajectoryService
from server.web.downloads import file_response
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.errors import NotReplayable
from shared.protocol import TrajectoryView

router = Routes(prefix="/v1/adapters/{name}/versions/{version}", tags=["trajectories"])
Step = Annotated[int, Path(ge=0, le=2**31 - 1)]
STEP_ROUTE = FILE_OF_ADAPTER | {"responses": FILE_OF_ADAPTER["responses"] | raises(NotReplayable)}


@router.get("/trajectory", responses=raises(*ABSENT))
def trajectory(principal: Reader, name: str, version: Version, session: Reading) -> TrajectoryView:
    """Shows the trajectory of a version; 404 if it has none."""
    return TrajectoryService(session).view(principal.tenant, name, version)


@router.head("/trajectory.bin", include_in_schema=False)
@router.get("/trajectory.bin", **FILE_OF_ADAPTER)
def trajectory_file(
    principal: Reader, name: str, version: Version, request: Request, state: State, session: Reading
) -> Response:
    """Downloads the trajectory as the device sent it; supports Range."""
    trajectory = TrajectoryService(session).view(principal.tenant, name, version)
    return file_response(request, state.artifacts, trajectory.sha256, f"{name}-{version}.trajectory.bin")


@router.head("/steps/{step}/lora_B.safetensors", include_in_schema=False)
@router.get("/steps/{step}/lora_B.safetensors", **STEP_ROUTE)
def step_file(principal: Reader, name: str, version: Version, step: Step, request: Request, state: State) -> Response:
    """Downloads LoRA-B after a number of steps of a verified run, rebuilt by replay; supports Range."""
    with state.database.reading() as session:
        adapter, stored = resolve(session, principal.tenant, name, f"v{version}")
        session.expunge_all()
    sha256 = StepService(state.database, state.artifacts).file(principal.tenant, adapter, stored, step)
    return file_response(request, state.artifacts, sha256, f"{name}-{version}.step-{step}.lora_B.safetensors")
