"""Files that others send in this server's place, once it has found that the caller may have them.

`accel`: the nginx in front of us sends it, told by X-Accel-Redirect, if it says that it understands that. `redirect`:
the bucket sends it, to whoever has the signed address that we answer with.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

from server.settings import Delivery
from server.storage.bucket import BucketArtifacts
from server.storage.directory import DiskArtifacts
from server.storage.store import ArtifactStore
from server.web.state import AppState

UNDERSTANDS = ("x-sendfile-type", "X-Accel-Redirect")  # what deploy/nginx.conf adds to each request


def handed_over(
    request: Request,
    artifacts: ArtifactStore,
    sha256: str,
    size: int,
    *,
    whole: bool,
    headers: dict[str, str],
    more: Mapping[str, str],
) -> Response | None:
    """The answer to a GET that leaves the sending to another; None if we send it ourselves.

    whole: whether all `size` bytes are to be sent, whatever range was asked for. headers: of an answer that we send;
    more: those of them that also go with an answer that sends the client elsewhere.
    """
    state: AppState = request.app.state.mobizo
    settings = state.settings
    if settings.delivery is Delivery.ACCEL and isinstance(artifacts, DiskArtifacts):
        if request.headers.get(UNDERSTANDS[0]) != UNDERSTANDS[1]:
            return None
        state.meters.handed_over(settings.delivery, size)
        location = {"X-Accel-Redirect": settings.accel_prefix + artifacts.name(sha256)}
        return Response(headers=headers | location, media_type="application/octet-stream")
    if settings.delivery is Delivery.REDIRECT and isinstance(artifacts, BucketArtifacts):
        # A bucket honours Range, but knows no tag of ours: a range that If-Range forbids would be sent all the same.
        if size < settings.redirect_bytes or (whole and "range" in request.headers):
            return None
        state.meters.handed_over(settings.delivery, size)
        url = artifacts.signed_url(sha256, settings.redirect_seconds)
        return Response(status_code=307, headers={**more, "Location": url, "Cache-Control": "private, no-store"})
    return None
