"""Routes that read the adapter registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from server.adapters import files
from server.adapters.models import StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.resolution import find_adapter, resolve
from server.adapters.service import AdapterService
from server.artifacts.naming import Collected
from server.artifacts.store import Damaged, StorageFull
from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.openapi import FILE, raises
from server.http.pages import Paging
from server.http.place import Here, Place, Reading
from server.http.problems import RangeNotSatisfiable
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from shared.errors import AdapterNotFound, FileNotInAdapter, RevisionNotFound
from shared.protocol import AdapterVersion, AdapterView, Page, PeftFile, PeftListing

router = Routes(prefix="/v1/adapters", tags=["adapters"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]
ABSENT = (AdapterNotFound, RevisionNotFound)
FILE_OF_ADAPTER = FILE_ROUTE | {
    "responses": FILE | raises(RangeNotSatisfiable, Damaged, *ABSENT, FileNotInAdapter, Collected, StorageFull)
}


@router.get("")
def adapters(
    principal: Reader,
    here: Here,
    session: Reading,
    paging: Paging,
    deleted: Annotated[bool, Query(description="those that were deleted and can be taken back")] = False,
) -> Page[AdapterView]:
    """The tenant's adapters, newest first."""
    found = AdapterRepository(session).page(principal.tenant, paging, deleted=deleted)
    return paging.page(AdapterService(session).views(found.rows, here.settings.adapter_grace), found.before)


@router.get("/{name}", responses=raises(AdapterNotFound))
def adapter(principal: Reader, name: str, here: Here, session: Reading) -> AdapterView:
    """One adapter with its latest version."""
    found = find_adapter(session, principal.tenant, name)
    return AdapterService(session).view(found, here.settings.adapter_grace)


@router.get("/{name}/versions/{version}", responses=raises(*ABSENT))
def version(principal: Reader, name: str, version: Version, session: Reading) -> AdapterVersion:
    """One immutable version."""
    adapter, stored = resolve(session, principal.tenant, name, f"v{version}")
    return stored.view(adapter)


@router.head("/{name}/versions/{version}/lora_B.safetensors", include_in_schema=False)
@router.get("/{name}/versions/{version}/lora_B.safetensors", **FILE_OF_ADAPTER)
def lora_b(principal: Reader, name: str, version: Version, request: Request, here: Here, session: Reading) -> Response:
    """The LoRA-B file as the device uploaded it; takes Range."""
    adapter, stored = resolve(session, principal.tenant, name, f"v{version}")
    filename = f"{adapter.name}-{stored.version}.lora_B.safetensors"
    return file_response(request, here.artifacts, stored.sha256, filename)


@router.get("/{name}/versions/{version}/peft", responses=raises(*ABSENT, Collected, StorageFull))
def peft(principal: Reader, name: str, version: Version, here: Here) -> PeftListing:
    """The files that make the version a PEFT directory."""
    stored = _stored(here, principal, name, version)
    found = files.listing(here.database, here.artifacts, stored)
    shown = [PeftFile(path=file.path, size=file.size, sha256=file.sha256) for file in found]
    return PeftListing(adapter=name, version=version, files=shown)


@router.head("/{name}/versions/{version}/peft/{file}", include_in_schema=False)
@router.get("/{name}/versions/{version}/peft/{file}", **FILE_OF_ADAPTER)
def peft_file(principal: Reader, name: str, version: Version, file: str, request: Request, here: Here) -> Response:
    """One of those files, or another form of the same version by its name; takes Range."""
    found = files.find(here.database, here.artifacts, _stored(here, principal, name, version), file)
    return file_response(request, here.artifacts, found.sha256, found.path)


def _stored(here: Place, principal: Principal, name: str, version: int) -> StoredVersion:
    """A version, read in a transaction of its own: files are made outside of any."""
    with here.database.reading() as session:
        _, stored = resolve(session, principal.tenant, name, f"v{version}")
        session.expunge_all()
    return stored
