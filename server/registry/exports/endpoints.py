"""Routes of merged models."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import Path, Query, Request, Response

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry.exports.service import MergedService
from server.storage.store import Damaged
from server.web.downloads import FILE_ROUTE, file_response
from server.web.idempotency import Once
from server.web.middleware import RangeNotSatisfiable
from server.web.openapi import FILE, Responses, raises
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope
from shared.errors import AdapterNotFound, BaseMismatch, FileNotInAdapter, NotFound, RevisionNotFound, UnknownBase
from shared.protocol import MergedForm, MergedModel

router = Routes(prefix="/v1/adapters/{name}/versions/{version}/merged", tags=["adapters"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]
Form = Annotated[MergedForm, Query(description="a Hugging Face directory, or a GGUF file in f16 or q8_0")]
ABSENT = (AdapterNotFound, RevisionNotFound)
LOCATION: Responses = {202: {"headers": {"Location": {"description": "where it stands", "schema": {"type": "string"}}}}}
FILE_OF_MERGED = FILE_ROUTE | {
    "responses": FILE | raises(RangeNotSatisfiable, Damaged, *ABSENT, NotFound, FileNotInAdapter)
}
_log = structlog.get_logger()


@router.post("", status_code=202, responses=LOCATION | raises(*ABSENT, UnknownBase, BaseMismatch))
def merge(
    principal: Reader,
    name: str,
    version: Version,
    response: Response,
    session: Writing,
    once: Once,
    form: Form = MergedForm.DIRECTORY,
) -> MergedModel:
    """Requests the version merged into its base model. Poll the Location until it is ready."""
    merged = MergedService(session).request(principal.tenant, name, version, form)
    _log.info("merged-model-asked", adapter=merged.adapter, version=version, form=str(form), state=merged.state)
    query = "" if form is MergedForm.DIRECTORY else f"?form={form}"
    response.headers["Location"] = f"/v1/adapters/{merged.adapter}/versions/{version}/merged{query}"
    return merged


@router.get("", responses=raises(*ABSENT, NotFound))
def merged(
    principal: Reader, name: str, version: Version, session: Reading, form: Form = MergedForm.DIRECTORY
) -> MergedModel:
    """Shows the state of the merged model, and its files once it is ready."""
    return MergedService(session).get(principal.tenant, name, version, form)


@router.head("/{file}", include_in_schema=False)
@router.get("/{file}", **FILE_OF_MERGED)
def merged_file(
    principal: Reader,
    name: str,
    version: Version,
    file: str,
    request: Request,
    state: State,
    session: Reading,
    form: Form = MergedForm.DIRECTORY,
) -> Response:
    """Downloads one file of the merged model; supports Range."""
    stored_file = MergedService(session).file(principal.tenant, name, version, file, form)
    return file_response(request, state.artifacts, stored_file.sha256, stored_file.path)
