"""Routes of programs and their files."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.assignments.repository import AssignmentRepository
from server.auth.guard import needs
from server.auth.models import Role, Scope
from server.auth.service import Principal
from server.http.place import Here, Reading
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from server.programs.repository import ProgramRepository
from server.programs.service import ProgramService
from shared.errors import NotFound
from shared.program import SignedManifest

router = Routes(prefix="/v1", tags=["programs"])
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="sha256, hexadecimal")]


@router.get("/programs/{recipe_id}")
def program(
    principal: Annotated[Principal, needs(Scope.JOBS_READ)], recipe_id: Digest, session: Reading
) -> SignedManifest:
    """The signed manifest of a compiled program that one of the tenant's jobs asked for."""
    return ProgramService(session).manifest(principal.tenant, recipe_id)


@router.head("/files/{sha256}", include_in_schema=False)
@router.get("/files/{sha256}", **FILE_ROUTE)
def file(
    principal: Annotated[Principal, needs(Scope.JOBS_READ, or_device=True)],
    sha256: Digest,
    request: Request,
    here: Here,
    session: Reading,
) -> Response:
    """A program's file; takes Range.

    For devices: of jobs leased to them, now or before, and of adapters that they may have; for apps: of their jobs.
    """
    programs = ProgramRepository(session)
    if principal.role is Role.DEVICE:
        device_id = principal.device_id or ""
        found = programs.file_of_device(device_id, sha256) or AssignmentRepository(session).file(device_id, sha256)
    else:
        found = programs.file_of_tenant(principal.tenant, sha256)
    if found is None:
        raise NotFound(f"there is no file {sha256}")
    return file_response(request, here.artifacts, sha256, found.name)
