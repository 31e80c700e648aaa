"""Routes that read the adapter registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from server.database.columns import view_of
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry import files
from server.registry.comparison import compare_revisions
from server.registry.models import AuditTrail, event_view
from server.registry.repository import AdapterRepository, find_adapter, read_version, resolve
from server.registry.service import AdapterService, removed_after
from server.registry.trajectories.reconstruction import b_file
from server.storage.store import Collected, Damaged, StorageFull
from server.web.downloads import FILE_ROUTE, file_response
from server.web.middleware import RangeNotSatisfiable
from server.web.openapi import FILE, raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.access import Scope
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
def list_adapters(
    principal: Reader,
    state: State,
    session: Reading,
    paging: Paging,
    deleted: Annotated[bool, Query(description="lists deleted adapters that can be restored")] = False,
) -> Page[AdapterView]:
    """Lists the tenant's adapters, newest first."""
    page_rows = AdapterRepository(session).page(principal.tenant, paging, deleted=deleted)
    return paging.page(AdapterService(session).views(page_rows.rows, state.settings.adapter_grace), page_rows.before)


@router.get("/{name}", responses=raises(AdapterNotFound))
def get_adapter(principal: Reader, name: str, state: State, session: Reading) -> AdapterView:
    """Shows an adapter with its latest version."""
    stored = find_adapter(session, principal.tenant, name)
    return AdapterService(session).view(stored, state.settings.adapter_grace)


@router.get("/{name}/versions/{version}", responses=raises(*ABSENT))
def get_version(principal: Reader, name: str, version: Version, session: Reading) -> AdapterVersion:
    """Shows an immutable version."""
    adapter, stored = resolve(session, principal.tenant, name, f"v{version}")
    return stored.view(adapter)


@router.get("/{name}/versions", responses=raises(AdapterNotFound))
def list_versions(
    principal: Reader,
    name: str,
    state: State,
    session: Reading,
    paging: Paging,
    in_state: Annotated[
        VersionState | None,
        Query(alias="state", description="only versions in this state; omitted: all, including deleted ones"),
    ] = None,
) -> Page[AdapterVersion]:
    """Lists an adapter's versions, newest first."""
    adapter = find_adapter(session, principal.tenant, name)
    page_rows = AdapterRepository(session).versions(adapter, paging, in_state)
    grace = state.settings.adapter_grace
    views = [stored.view(adapter, removed_after(stored.deleted_at, grace)) for stored in page_rows.rows]
    return paging.page(views, page_rows.before)


@router.get("/{name}/revisions/{revision}", responses=raises(*ABSENT))
def get_revision(principal: Reader, name: str, revision: Revision, session: Reading) -> AdapterVersion:
    """Shows the version of a revision: `main`, a number, or the beginning of a revision's digits."""
    adapter, stored = resolve(session, principal.tenant, name, revision)
    return stored.view(adapter)


@router.get("/{name}/events", responses=raises(AdapterNotFound))
def list_adapter_events(principal: Reader, name: str, session: Reading, paging: Paging) -> Page[AdapterEvent]:
    """Lists an adapter's audit trail, newest first, also after the adapter was deleted or removed."""
    page_rows = AuditTrail(session).page(principal.tenant, name, paging)
    if not page_rows.rows and paging.before is None:
        find_adapter(session, principal.tenant, name)
    return paging.page([event_view(row) for row in page_rows.rows], page_rows.before)


@router.get("/{name}/compare", responses=raises(*ABSENT))
def compare_versions(
    principal: Reader,
    name: str,
    session: Reading,
    left: Annotated[str, Query(max_length=100, description="a revision")],
    right: Annotated[str, Query(max_length=100, description="a revision")],
    other: Annotated[str | None, Query(max_length=100, description="the adapter on the right; null: the same")] = None,
) -> Comparison:
    """Compares two versions: their settings and scores."""
    return compare_revisions(session, principal.tenant, (name, left), (other or name, right))


@router.head("/{name}/versions/{version}/lora_B.safetensors", include_in_schema=False)
@router.get("/{name}/versions/{version}/lora_B.safetensors", **FILE_OF_ADAPTER)
def download_lora_b(principal: Reader, name: str, version: Version, request: Request, state: State) -> Response:
    """Downloads the LoRA-B file as the device made it; supports Range."""
    sha256 = b_file(
        state.database, state.artifacts, read_version(state.database, principal.tenant, name, f"v{version}")
    )
    return file_response(request, state.artifacts, sha256, f"{name}-{version}.lora_B.safetensors")


@router.get("/{name}/versions/{version}/peft", responses=raises(*ABSENT, AMismatch, Collected, StorageFull))
def list_peft_files(principal: Reader, name: str, version: Version, state: State) -> PeftListing:
    """Lists the files of the version's PEFT directory."""
    stored = read_version(state.database, principal.tenant, name, f"v{version}")
    peft_files = [view_of(PeftFile, row) for row in files.listing(state, stored)]
    return PeftListing(adapter=name, version=version, files=peft_files)


@router.head("/{name}/versions/{version}/peft/{file}", include_in_schema=False)
@router.get("/{name}/versions/{version}/peft/{file}", **FILE_OF_ADAPTER)
def download_peft_file(
    principal: Reader, name: str, version: Version, file: str, request: Request, state: State
) -> Response:
    """Downloads a file of the PEFT directory, or of another export format by name; supports Range."""
    stored_file = files.find(state, read_version(state.database, principal.tenant, name, f"v{version}"), file)
    return file_response(request, state.artifacts, stored_file.sha256, stored_file.path)
