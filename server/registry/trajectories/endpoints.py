"""Routes of trajectories."""

from __future__ import annotations

from fastapi import Request, Response

from server.registry.endpoints import ABSENT, FILE_OF_ADAPTER, Reader, Version
from server.registry.trajectories.service import trajectory_view
from server.web.downloads import file_response
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.protocol import TrajectoryView

router = Routes(prefix="/v1/adapters/{name}/versions/{version}", tags=["trajectories"])


@router.get("/trajectory", responses=raises(*ABSENT))
def get_trajectory(principal: Reader, name: str, version: Version, session: Reading) -> TrajectoryView:
    """Shows the trajectory of a version; 404 if it has none."""
    return trajectory_view(session, principal.tenant, name, version)


@router.head("/trajectory.bin", include_in_schema=False)
@router.get("/trajectory.bin", **FILE_OF_ADAPTER)
def download_trajectory(
    principal: Reader, name: str, version: Version, request: Request, state: State, session: Reading
) -> Response:
    """Downloads the trajectory as the device sent it; supports Range."""
    trajectory = trajectory_view(session, principal.tenant, name, version)
    return file_response(request, state.artifacts, trajectory.sha256, f"{name}-{version}.trajectory.bin")
