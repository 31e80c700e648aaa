"""Routes of the Hub's read API, at the root: huggingface_hub finds them with `endpoint=` or HF_ENDPOINT set to us.

These are the routes that `hf download`, `snapshot_download`, PEFT's `Auto` classes, vLLM's resolver of adapters and
`hf auth whoami` call. They come after all others, which therefore keep every address that both could answer. Writing
goes through /v1.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Request, Response

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry.files import listing
from server.registry.hub.refusals import HubRoute, NotReleased
from server.registry.hub.service import absent, account, find_file, find_snapshot, model_info, tree_entry
from server.storage.store import Collected, Damaged, StorageFull
from server.web.downloads import FILE_ROUTE, file_response
from server.web.middleware import RangeNotSatisfiable
from server.web.openapi import FILE, raises
from server.web.routes import Routes
from server.web.state import State
from shared.access import Scope
from shared.errors import AdapterNotFound, FileNotInAdapter, RevisionNotFound

MODEL = "/api/models/{tenant}/{name}"
_ERRORS = (AdapterNotFound, RevisionNotFound, NotReleased, FileNotInAdapter, Collected, StorageFull)
_RESPONSES = raises(*_ERRORS)
_FILE = FILE_ROUTE | {"responses": FILE | raises(*_ERRORS, RangeNotSatisfiable, Damaged)}
_HIDDEN = re.compile(rb"%(2f|5c)", re.IGNORECASE)  # a slash or backslash that the path does not show
_FOR_GOOD = "private, max-age=31536000, immutable, no-transform"
_ASK_AGAIN = "private, no-cache, no-transform"

router = Routes(HubRoute, tags=["hub"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]


@router.get("/api/whoami-v2")
def get_hub_account(principal: Annotated[Principal, needs()]) -> dict[str, Any]:
    """Returns the account of the request's token. Its name is the tenant, the first part of repository names."""
    return account(principal)


@router.get(MODEL + "/revision/{revision:path}", responses=_RESPONSES)
def get_hub_model(principal: Reader, tenant: str, name: str, revision: str, state: State) -> dict[str, Any]:
    """An adapter at a revision."""
    snapshot = find_snapshot(state, principal.tenant, tenant, name, revision)
    return model_info(snapshot, listing(state, snapshot.version))


@router.get(MODEL + "/tree/{revision}", responses=_RESPONSES)
def list_hub_files(principal: Reader, tenant: str, name: str, revision: str, state: State) -> list[dict[str, Any]]:
    """The files of a revision by name, all on one page."""
    snapshot = find_snapshot(state, principal.tenant, tenant, name, revision)
    return [tree_entry(file) for file in listing(state, snapshot.version)]


@router.head("/{tenant}/{name}/resolve/{revision}/{path:path}", include_in_schema=False)
@router.get("/{tenant}/{name}/resolve/{revision}/{path:path}", **_FILE)
def download_hub_file(
    principal: Reader, tenant: str, name: str, revision: str, path: str, request: Request, state: State
) -> Response:
    """A file; takes Range. HEAD tells its sha256 (ETag), size and version (X-Repo-Commit).

    This server always answers a HEAD itself, and a GET that is redirected to a bucket carries the same headers. Each
    try gets a signed address of its own, so that a download that is resumed after an hour does not fail.
    """
    snapshot = find_snapshot(state, principal.tenant, tenant, name, revision)
    if _HIDDEN.search(request.scope.get("raw_path", b"")):
        raise absent(snapshot)
    file = find_file(state, snapshot, path)
    headers = {
        "X-Repo-Commit": snapshot.version.revision,
        # The file's own, whatever becomes of ETag and Content-Length on the way.
        "X-Linked-Etag": f'"{file.sha256}"',
        "X-Linked-Size": str(file.size),
        # no-transform: proxies must not compress the file, since ranges and sizes refer to its own bytes.
        "Cache-Control": _FOR_GOOD if revision == snapshot.version.revision else _ASK_AGAIN,
    }
    return file_response(request, state.artifacts, file.sha256, file.path, headers)
