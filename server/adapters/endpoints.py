"""Routes that read the adapter registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from server.adapters import files
from server.adapters.audit import AuditTrail, shown
from server.adapters.comparison import comparable, compare_weights
from server.adapters.comparison import compare as comparison
from server.adapters.models import StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.resolution import find_adapter, resolve
from server.adapters.service import AdapterService, removed_after
from server.artifacts.naming import Collected
from server.artifacts.store import Damaged, StorageFull
from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.history.remaking import b_file
from server.http.openapi import FILE, raises
from server.http.pages import Paging
from server.http.place import Here, Place, Reading
from server.http.problems import RangeNotSatisfiable
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from shared.errors import AdapterNotFound, AMismatch, FileNotInAdapter, RevisionNotFound, UnsupportedFormat
from shared.protocol import AdapterVersion, AdapterView, Page, PeftFile, PeftListing
from shared.registry import AdapterEvent, Comparison, VersionState

router = Routes(prefix="/v1/adapters", tags=["adapters"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]
Revision = Annotated[str, Path(max_length=100)]
ABSENT = (AdapterNotFound, RevisionNotFound)
UNCONVERTIBLE = (UnsupportedFormat, AMismatch)
FILE_OF_ADAPTER = FILE_ROUTE | {
    "responses": FILE
    | raises(RangeNotSatisfiable, Damaged, *ABSENT, FileNotInAdapter, *UNCONVERTIBLE, Collected, StorageFull)
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


@router.get("/{name}/versions", responses=raises(AdapterNotFound))
def versions(
    principal: Reader,
    name: str,
    here: Here,
    session: Reading,
    paging: Paging,
    state: Annotated[VersionState | None, Query(description="only those; null: all, deleted ones too")] = None,
) -> Page[AdapterVersion]:
    """An adapter's versions, newest first."""
    adapter = find_adapter(session, principal.tenant, name)
    found = AdapterRepository(session).versions(adapter, paging, state)
    grace = here.settings.adapter_grace
    shown = [stored.view(adapter, removed_after(stored.deleted_at, grace)) for stored in found.rows]
    return paging.page(shown, found.before)


@router.get("/{name}/revisions/{revision}", responses=raises(*ABSENT))
def revision(principal: Reader, name: str, revision: Revision, session: Reading) -> AdapterVersion:
    """The version that `main`, a tag, a number or (the beginning of) a revision stands for."""
    adapter, stored = resolve(session, principal.tenant, name, revision)
    return stored.view(adapter)


@router.get("/{name}/events", responses=raises(AdapterNotFound))
def adapter_events(principal: Reader, name: str, session: Reading, paging: Paging) -> Page[AdapterEvent]:
    """Who did what to an adapter and why, newest first; to be had also once it is deleted or removed."""
    found = AuditTrail(session).page(principal.tenant, name, paging)
    if not found.rows and paging.before is None:
        find_adapter(session, principal.tenant, name)
    return paging.page([shown(row) for row in found.rows], found.before)


@router.get("/{name}/compare", responses=raises(*ABSENT, Damaged))
def compare(
    principal: Reader,
    name: str,
    here: Here,
    left: Annotated[str, Query(max_length=100, description="a revision")],
    right: Annotated[str, Query(max_length=100, description="a revision")],
    other: Annotated[str | None, Query(max_length=100, description="the adapter on the right; null: the same")] = None,
) -> Comparison:
    """What two versions differ in: settings, scores, and B where it multiplies the same A."""
    with here.database.reading() as session:
        _, first = resolve(session, principal.tenant, name, left)
        _, second = resolve(session, principal.tenant, other or name, right)
        session.expunge_all()
    facts = first.signed.manifest, second.signed.manifest
    weights = None
    if comparable(*facts):
        left_b, right_b = (files.flat_b(here.database, here.artifacts, version) for version in (first, second))
        weights = compare_weights(left_b, right_b)
    return comparison(*facts, weights)


@router.head("/{name}/versions/{version}/lora_B.safetensors", include_in_schema=False)
@router.get("/{name}/versions/{version}/lora_B.safetensors", **FILE_OF_ADAPTER)
def lora_b(principal: Reader, name: str, version: Version, request: Request, here: Here) -> Response:
    """The LoRA-B file as the device made it; takes Range."""
    sha256 = b_file(here.database, here.artifacts, _stored(here, principal, name, version))
    return file_response(request, here.artifacts, sha256, f"{name}-{version}.lora_B.safetensors")


@router.get("/{name}/versions/{version}/peft", responses=raises(*ABSENT, AMismatch, Collected, StorageFull))
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
