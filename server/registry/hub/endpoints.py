"""Routes of the Hub's read API, at the root: huggingface_hub finds them with `endpoint=` or HF_ENDPOINT set to us.

They come after all others, which therefore keep every address that both could answer. Writing goes through /v1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry.files import AdapterFile
from server.registry.hub import views
from server.registry.hub.downloads import download, is_devious, warning
from server.registry.hub.paging import Paging
from server.registry.hub.path_forms import FORM, PathsForm
from server.registry.hub.refusals import HubRoutes, NotReleased
from server.registry.hub.repository import HubRepository
from server.registry.hub.schemas import Account, CommitInfo, ModelInfo, Refs, TreeEntry
from server.registry.hub.service import HubService, Snapshot
from server.storage.store import Collected, Damaged, StorageFull
from server.web.downloads import FILE_ROUTE
from server.web.middleware import RangeNotSatisfiable
from server.web.openapi import FILE, raises
from server.web.pages import InvalidCursor
from server.web.state import AppState, State
from shared.access import Scope
from shared.errors import AdapterNotFound, FileNotInAdapter, RevisionNotFound
from shared.registry import MAIN

MODEL = "/api/models/{tenant}/{name}"
_ADAPTER_ERRORS = raises(AdapterNotFound)
_ABSENT = (AdapterNotFound, RevisionNotFound, NotReleased)
_FILE_ERRORS = (*_ABSENT, FileNotInAdapter, Collected, StorageFull)
_REVISION_RESPONSES, _FILES_RESPONSES = raises(*_ABSENT), raises(*_FILE_ERRORS)
_FILE = FILE_ROUTE | {"responses": FILE | raises(*_FILE_ERRORS, RangeNotSatisfiable, Damaged)}
_BARE: dict[str, Any] = {"response_model_exclude_none": True}

router = HubRoutes(tags=["hub"])
Word = Annotated[str, Field(max_length=200)]
Expand = Annotated[list[Word], Query(default_factory=list, max_length=50, description="only these properties")]
Blobs = Annotated[bool, Query(description="what the files are, too, not only their names")]
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]


def _service(state: AppState, principal: Principal) -> HubService:
    return HubService(state.database, state.artifacts, principal.tenant)


def _warn(response: Response, snapshot: Snapshot) -> None:
    response.headers.update(warning(snapshot))


@router.get("/api/whoami-v2", **_BARE)
def whoami(principal: Annotated[Principal, needs()]) -> Account:
    """Returns the account of the request's token. Its name is the tenant, the first part of repository names."""
    return views.account(principal)


@router.get("/api/models", responses=raises(InvalidCursor), **_BARE)
def models(
    principal: Reader,
    state: State,
    paging: Paging,
    response: Response,
    tags: Annotated[list[Word], Query(alias="filter", default_factory=list, max_length=20, description="it must have")],
    author: Annotated[
        str | None, Query(max_length=100, description="a tenant; another than the caller's has none")
    ] = None,
    search: Annotated[str, Query(max_length=100, description="part of the name")] = "",
) -> list[ModelInfo]:
    """The caller's adapters, newest first; more by the Link header."""
    if author not in (None, principal.tenant) or not set(tags) <= set(views.TAGS):
        return []
    with state.database.reading() as session:
        repository = HubRepository(session)
        page_rows = repository.page(principal.tenant, search, paging.request)
        mains = repository.mains(page_rows.rows)
        infos = [views.described(adapter, mains.get(adapter.number)) for adapter in page_rows.rows]
    paging.tell_next(response, page_rows.before)
    return infos


@router.get(MODEL, responses=_FILES_RESPONSES, **_BARE)
def model(
    principal: Reader,
    tenant: str,
    name: str,
    state: State,
    response: Response,
    expand: Expand,
    blobs: Blobs = False,
) -> ModelInfo:
    """An adapter at `main`."""
    return _model(_service(state, principal), tenant, name, MAIN, response, blobs, expand)


@router.get(MODEL + "/revision/{revision:path}", responses=_FILES_RESPONSES, **_BARE)
def model_revision(
    principal: Reader,
    tenant: str,
    name: str,
    revision: str,
    state: State,
    response: Response,
    expand: Expand,
    blobs: Blobs = False,
) -> ModelInfo:
    """An adapter at a revision."""
    return _model(_service(state, principal), tenant, name, revision, response, blobs, expand)


def _model(
    service: HubService, tenant: str, name: str, revision: str, response: Response, blobs: bool, expand: Sequence[str]
) -> ModelInfo:
    snapshot = service.snapshot(tenant, name, revision)
    _warn(response, snapshot)
    # Files are generated on request; a request for the revision alone does not wait for them.
    needs_files = not expand or {"siblings", "usedStorage"} & set(expand)
    info = views.model_info(snapshot, service.files(snapshot) if needs_files else [], blobs=blobs)
    return views.only(info, expand) if expand else info


@router.get(MODEL + "/tree/{revision}", responses=_FILES_RESPONSES | raises(InvalidCursor), **_BARE)
def tree(
    principal: Reader,
    tenant: str,
    name: str,
    revision: str,
    state: State,
    paging: Paging,
    response: Response,
    recursive: Annotated[bool, Query(description="taken, and changes nothing: there are no folders")] = False,
    expand: Annotated[bool, Query(description="with the version that each file came with")] = False,
) -> list[TreeEntry]:
    """The files of a revision by name; more by the Link header."""
    service = _service(state, principal)
    snapshot = service.snapshot(tenant, name, revision)
    _warn(response, snapshot)
    files = service.files(snapshot)
    first, last = paging.span(len(files))
    paging.tell_next(response, last if last < len(files) else None)
    return [views.tree_entry(snapshot, file, expand=expand) for file in files[first:last]]


@router.get(MODEL + "/tree/{revision}/{path:path}", responses=_FILES_RESPONSES, **_BARE)
def subtree(
    principal: Reader,
    tenant: str,
    name: str,
    revision: str,
    path: str,
    state: State,
    expand: Annotated[bool, Query(description="with the version that the file came with")] = False,
) -> list[TreeEntry]:
    """One file of a revision; there are no folders."""
    service = _service(state, principal)
    snapshot = service.snapshot(tenant, name, revision)
    return [views.tree_entry(snapshot, service.file(snapshot, path), expand=expand)]


@router.get(MODEL + "/refs", responses=_ADAPTER_ERRORS, **_BARE)
def refs(
    principal: Reader, tenant: str, name: str, state: State, include_prs: Annotated[bool, Query()] = False
) -> Refs:
    """`main`, the tags, and every version's number."""
    adapter = _service(state, principal).adapter(tenant, name)
    with state.database.reading() as session:
        repository = HubRepository(session)
        main = repository.mains([adapter]).get(adapter.number)
        names = repository.names(adapter)
    return views.refs(None if main is None else main.revision, names, pull_requests=include_prs)


@router.get(MODEL + "/commits/{revision:path}", responses=_REVISION_RESPONSES | raises(InvalidCursor), **_BARE)
def commits(
    principal: Reader, tenant: str, name: str, revision: str, state: State, paging: Paging, response: Response
) -> list[CommitInfo]:
    """The versions up to a revision, newest first; more by the Link header."""
    snapshot = _service(state, principal).snapshot(tenant, name, revision)
    with state.database.reading() as session:
        page_rows = HubRepository(session).history(snapshot.version, paging.request)
        commit_infos = views.commits(snapshot.adapter, page_rows.rows)
    paging.tell_next(response, page_rows.before)
    return commit_infos


@router.get(MODEL + "/auth-check", responses=_ADAPTER_ERRORS)
def auth_check(principal: Reader, tenant: str, name: str, state: State) -> dict[str, bool]:
    """Whether the caller may read an adapter: 200, or the refusal."""
    _service(state, principal).adapter(tenant, name)
    return {"ok": True}


@router.post(MODEL + "/paths-info/{revision:path}", responses=_FILES_RESPONSES, openapi_extra=FORM, **_BARE)
def paths_info(
    principal: Reader,
    tenant: str,
    name: str,
    revision: str,
    state: State,
    response: Response,
    form: PathsForm,
) -> list[TreeEntry]:
    """The named files, also those that are not listed; names that lead to nothing are passed over."""
    service = _service(state, principal)
    snapshot = service.snapshot(tenant, name, revision)
    _warn(response, snapshot)
    files = [file for path in dict.fromkeys(form.paths) if (file := _or_none(service, snapshot, path)) is not None]
    return [views.tree_entry(snapshot, file, expand=form.expand) for file in files]


def _or_none(service: HubService, snapshot: Snapshot, path: str) -> AdapterFile | None:
    try:
        return service.file(snapshot, path)
    except FileNotInAdapter:
        return None


@router.head("/{tenant}/{name}/resolve/{revision}/{path:path}", include_in_schema=False)
@router.get("/{tenant}/{name}/resolve/{revision}/{path:path}", **_FILE)
def resolve(
    principal: Reader, tenant: str, name: str, revision: str, path: str, request: Request, state: State
) -> Response:
    """A file; takes Range. HEAD tells its sha256 (ETag), size and version (X-Repo-Commit)."""
    service = _service(state, principal)
    snapshot = service.snapshot(tenant, name, revision)
    if is_devious(request):
        raise service.absent(snapshot)
    return download(request, state.artifacts, snapshot, service.file(snapshot, path), revision)
