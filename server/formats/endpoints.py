"""Routes of merged models."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import Path, Request, Response

from server.artifacts.store import Damaged
from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.formats.service import MergedService
from server.http.idempotency import Once
from server.http.openapi import FILE, Responses, raises
from server.http.place import Here, Reading, Writing
from server.http.problems import RangeNotSatisfiable
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from shared.errors import AdapterNotFound, BaseMismatch, FileNotInAdapter, NotFound, RevisionNotFound, UnknownBase
from shared.protocol import MergedModel

router = Routes(prefix="/v1/adapters/{name}/versions/{version}/merged", tags=["adapters"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]
ABSENT = (AdapterNotFound, RevisionNotFound)
LOCATION: Responses = {202: {"headers": {"Location": {"description": "where it stands", "schema": {"type": "string"}}}}}
FILE_OF_MERGED = FILE_ROUTE | {
    "responses": FILE | raises(RangeNotSatisfiable, Damaged, *ABSENT, NotFound, FileNotInAdapter)
}
_log = structlog.get_logger()


@router.post("", status_code=202, responses=LOCATION | raises(*ABSENT, UnknownBase, BaseMismatch))
def merge(
    principal: Reader, name: str, version: Version, response: Response, session: Writing, once: Once
) -> MergedModel:
    """Asks for the version merged into its base model; ask the Location until it is ready."""
    merged = MergedService(session).want(principal.tenant, name, version)
    _log.info("merged-model-asked", adapter=merged.adapter, version=version, state=merged.state)
    response.headers["Location"] = f"/v1/adapters/{merged.adapter}/versions/{version}/merged"
    return merged


@router.get("", responses=raises(*ABSENT, NotFound))
def merged(principal: Reader, name: str, version: Version, session: Reading) -> MergedModel:
    """Where the merged model stands; its files, once it is ready."""
    return MergedService(session).get(principal.tenant, name, version)


@router.head("/{file}", include_in_schema=False)
@router.get("/{file}", **FILE_OF_MERGED)
def merged_file(
    principal: Reader, name: str, version: Version, file: str, request: Request, here: Here, session: Reading
) -> Response:
    """One of those files; takes Range."""
    found = MergedService(session).file(principal.tenant, name, version, file)
    return file_response(request, here.artifacts, found.sha256, found.path)
