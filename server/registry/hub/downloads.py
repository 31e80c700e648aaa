"""A file of a repository for sending: its version, its sha256 and its size. The server, nginx or a bucket sends it.

Clients take what they need from a HEAD, then fetch. We always answer the HEAD ourselves, with the file's own size, and
a GET that is sent to a bucket carries the same headers. So each try gets a signed address of its own, and a download
that is taken up again after an hour does not fail because the first address has run out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import Request, Response

from server.registry.files import AdapterFile
from server.registry.hub.refusals import plain
from server.registry.hub.service import Snapshot
from server.storage.store import ArtifactStore
from server.web.downloads import file_response
from shared.registry import VersionState

_HIDDEN = re.compile(rb"%(2f|5c)", re.IGNORECASE)  # a slash or backslash that the path does not show
_FOR_GOOD = "private, max-age=31536000, immutable, no-transform"
_ASK_AGAIN = "private, no-cache, no-transform"


def is_devious(request: Request) -> bool:
    """Whether a path hides where it leads."""
    return _HIDDEN.search(request.scope.get("raw_path", b"")) is not None


def warning(snapshot: Snapshot) -> Mapping[str, str]:
    """A header that clients show to people, once: that a version is deprecated, and why."""
    version = snapshot.version
    if version.state is not VersionState.DEPRECATED:
        return {}
    text = f"version {version.version} of {snapshot.id} is deprecated: {version.message}"
    return {"X-HF-Warning": plain(f"deprecated-{snapshot.commit}; {text}")}


def download(
    request: Request, artifacts: ArtifactStore, snapshot: Snapshot, file: AdapterFile, revision: str
) -> Response:
    """The answer to a HEAD or GET of a file. revision: as it was asked for; a name may lead elsewhere tomorrow."""
    headers = {
        "X-Repo-Commit": snapshot.commit,
        # The file's own, whatever becomes of ETag and Content-Length on the way.
        "X-Linked-Etag": f'"{file.sha256}"',
        "X-Linked-Size": str(file.size),
        # no-transform: proxies must not compress the file, since ranges and sizes refer to its own bytes.
        "Cache-Control": _FOR_GOOD if revision == snapshot.commit else _ASK_AGAIN,
        **warning(snapshot),
    }
    return file_response(request, artifacts, file.sha256, file.path, headers)
