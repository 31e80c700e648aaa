"""Routes of the adapter registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from server.adapters.peft import PeftService
from server.adapters.repository import AdapterRepository
from server.adapters.service import AdapterService
from server.artifacts.naming import Collected
from server.artifacts.store import StorageFull
from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.history.remaking import b_file
from server.http.openapi import raises
from server.http.pages import Paging
from server.http.place import Here, Reading
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from shared.protocol import AdapterVersion, AdapterView, Page, PeftListing

router = Routes(prefix="/v1/adapters", tags=["adapters"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]


@router.get("")
def adapters(principal: Reader, session: Reading, paging: Paging) -> Page[AdapterView]:
    """The tenant's adapters, newest first."""
    found = AdapterRepository(session).page(principal.tenant, paging)
    service = AdapterService(session)
    return paging.page([service.view(adapter) for adapter in found.rows], found.before)


@router.get("/{name}")
def adapter(principal: Reader, name: str, session: Reading) -> AdapterView:
    """One adapter with its latest version."""
    return AdapterService(session).get(principal.tenant, name)


@router.get("/{name}/versions/{version}")
def version(principal: Reader, name: str, version: Version, session: Reading) -> AdapterVersion:
    """One immutable version."""
    adapter, stored = AdapterService(session).version(principal.tenant, name, version)
    return stored.view(adapter)


@router.head("/{name}/versions/{version}/lora_B.safetensors", include_in_schema=False)
@router.get("/{name}/versions/{version}/lora_B.safetensors", **FILE_ROUTE)
def lora_b(principal: Reader, name: str, version: Version, request: Request, here: Here, session: Reading) -> Response:
    """The LoRA-B file as the device uploaded it; takes Range."""
    adapter, stored = AdapterService(session).version(principal.tenant, name, version)
    filename = f"{adapter.name}-{stored.version}.lora_B.safetensors"
    return file_response(request, here.artifacts, b_file(here.database, here.artifacts, stored), filename)


@router.get("/{name}/versions/{version}/peft", responses=raises(Collected, StorageFull))
def peft(principal: Reader, name: str, version: Version, here: Here) -> PeftListing:
    """The files that make the version a PEFT directory."""
    return PeftService(here.database, here.artifacts).listing(principal.tenant, name, version)


@router.head("/{name}/versions/{version}/peft/{file}", include_in_schema=False)
@router.get("/{name}/versions/{version}/peft/{file}", **FILE_ROUTE)
def peft_file(principal: Reader, name: str, version: Version, file: str, request: Request, here: Here) -> Response:
    """One of those files; takes Range."""
    found = PeftService(here.database, here.artifacts).file(principal.tenant, name, version, file)
    return file_response(request, here.artifacts, found.sha256, found.path)
