"""Routes of programs and their files."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.identity.access_rules import needs
from server.identity.tokens import DevicePrincipal, Principal
from server.programs.service import ACCESS, ProgramService
from server.web.downloads import FILE_ROUTE, file_response
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.access import Scope
from shared.errors import NotFound
from shared.program import SignedManifest

router = Routes(prefix="/v1", tags=["programs"])
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="sha256, hexadecimal")]


@router.get("/programs/{recipe_id}")
def get_program(
    principal: Annotated[Principal, needs(Scope.JOBS_READ)], recipe_id: Digest, session: Reading
) -> SignedManifest:
    """The signed manifest of a compiled program that one of the tenant's jobs asked for."""
    return ProgramService(session).manifest(principal.tenant, recipe_id)


@router.head("/files/{sha256}", include_in_schema=False)
@router.get("/files/{sha256}", **FILE_ROUTE)
def download_file(
    principal: Annotated[Principal, needs(Scope.JOBS_READ, or_device=True)],
    sha256: Digest,
    request: Request,
    state: State,
    session: Reading,
) -> Response:
    """A program's file; takes Range.

    For devices: of jobs leased to them, now or before, and of adapters that they may have; for apps: of their jobs.
    """
    access = ACCESS.get()
    if isinstance(principal, DevicePrincipal):
        searches = (find(session, principal.device_id, sha256) for find in access.files_of_device)
        listed_file = next((file for file in searches if file is not None), None)
    else:
        listed_file = access.file_of_tenant(session, principal.tenant, sha256)
    if listed_file is None:
        raise NotFound(f"there is no file {sha256}")
    return file_response(request, state.artifacts, sha256, listed_file.name)
