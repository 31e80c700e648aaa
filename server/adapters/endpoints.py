"""Routes of the adapter registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.adapters.peft import PeftService
from server.adapters.repository import AdapterRepository
from server.adapters.service import AdapterService
from server.auth.guard import App
from server.http.openapi import FILE_PARAMETERS
from server.http.pages import Paging
from server.http.place import Here, Reading
from server.http.ranges import FILE_RESPONSES, file_response
from server.http.routes import Routes
from shared.protocol import AdapterVersion, AdapterView, Page, PeftListing

router = Routes(prefix="/v1/adapters", tags=["adapters"])
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]


@router.get("")
def adapters(session: Reading, principal: App, paging: Paging) -> Page[AdapterView]:
    """The tenant's adapters, newest first."""
    found = AdapterRepository(session).page(principal.tenant, paging)
    service = AdapterService(session)
    return paging.page([service.view(adapter) for adapter in found.rows], found.before)


@router.get("/{name}")
def adapter(name: str, session: Reading, principal: App) -> AdapterView:
    """One adapter with its latest version."""
    return AdapterService(session).get(principal.tenant, name)


@router.get("/{name}/versions/{version}")
def version(name: str, version: Version, session: Reading, principal: App) -> AdapterVersion:
    """One immutable version."""
    adapter, stored = AdapterService(session).version(principal.tenant, name, version)
    return stored.view(adapter)


@router.head("/{name}/versions/{version}/lora_B.safetensors", include_in_schema=False)
@router.get("/{name}/versions/{version}/lora_B.safetensors", response_class=Response, responses=FILE_RESPONSES, openapi_extra=FILE_PARAMETERS)
def lora_b(name: str, version: Version, request: Request, here: Here, session: Reading, principal: App) -> Response:
    """The LoRA-B file as the device uploaded it; takes Range."""
    adapter, stored = AdapterService(session).version(principal.tenant, name, version)
    filename = f"{adapter.name}-{stored.version}.lora_B.safetensors"
    return file_response(request, here.artifacts, stored.sha256, filename)


@router.get("/{name}/versions/{version}/peft")
def peft(name: str, version: Version, here: Here, principal: App) -> PeftListing:
    """The files that make the version a PEFT directory."""
    return PeftService(here.database, here.artifacts).listing(principal.tenant, name, version)


@router.head("/{name}/versions/{version}/peft/{file}", include_in_schema=False)
@router.get("/{name}/versions/{version}/peft/{file}", response_class=Response, responses=FILE_RESPONSES, openapi_extra=FILE_PARAMETERS)
def peft_file(name: str, version: Version, file: str, request: Request, here: Here, principal: App) -> Response:
    """One of those files; takes Range."""
    found = PeftService(here.database, here.artifacts).file(principal.tenant, name, version, file)
    return file_response(request, here.artifacts, found.sha256, found.path)
