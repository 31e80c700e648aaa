"""The router of the pages: it answers errors with pages that say what to do, and adds the headers of every page."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

import structlog
from fastapi import HTTPException, Request, Response

from server.dashboard.pages import LOGIN, Visitor, finished, page, redirect, return_path
from server.settings import Settings
from server.web.middleware import current_request_id, problem_response
from server.web.routes import UNCHECKED_BODY_BYTES, BodyKind, Handler, Route, Routes
from server.web.streams import EVENTS
from shared.errors import Forbidden, MobizoError, NotFound, TooManyRequests, Unauthorized

_log = structlog.get_logger()
# What to do about an error, by its code; the error's own words come first.
REMEDIES = {
    "forged-form": "Go back, reload the page, and send the form again.",
    "conflict": "Someone else may have acted in the meantime. Go back and look at the current state.",
    "unavailable": "Wait a few seconds and reload the page. If it lasts, look at the server's log.",
    "internal-error": "Nothing was changed. Try again; if it lasts, look for the request id in the server's log.",
    "tenant-suspended": "Ask the operator of this server.",
}


class PageRoute(Route):
    """A page, or a form that is posted."""

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **{**options, "include_in_schema": False})

    @property
    def body_kind(self) -> BodyKind:
        """A form, if one is posted."""
        return BodyKind.FORM if self.methods == {"POST"} else BodyKind.NONE

    def body_limit(self, settings: Settings) -> int:
        """Returns the most bytes of a form."""
        return min(UNCHECKED_BODY_BYTES, super().body_limit(settings))

    def get_route_handler(self) -> Handler:
        """Returns the function that answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except HTTPException:
                raise
            except Exception:
                _log.exception("request-crashed", method=request.method, path=request.url.path)
                response = refusal(request, MobizoError())
            return finished(request, response)

        return answer

    def refused(self, request: Request, error: MobizoError) -> Response:
        """Returns a page that says why, or the login page."""
        return refusal(request, error)


class PageRoutes(Routes):
    """The pages of one part of the dashboard."""

    def __init__(self, **options: Any) -> None:
        super().__init__(PageRoute, tags=["dashboard"], **options)


def refusal(request: Request, error: MobizoError) -> Response:
    """Returns the answer to a request that failed: the login page for one without a session, or a page that says why.

    A script that reads events gets a problem document instead.
    """
    problem = problem_response(error, request)
    if EVENTS in request.headers.get("accept", ""):
        return problem
    if isinstance(error, Unauthorized):
        return _login(request)
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    missing = error.extra.get("missing", ()) if isinstance(error, Forbidden) else ()
    response = page(
        request,
        visitor,
        "error.html",
        error.title,
        problem.status_code,
        error=error,
        number=problem.status_code,
        request_id=current_request_id() if problem.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else None,
        missing=missing,
        remedy=REMEDIES.get(error.code),
        gone=isinstance(error, NotFound),
        back=_page_before(request),
    )
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = problem.headers["Retry-After"]
    return response


def _login(request: Request) -> Response:
    if request.headers.get("hx-request") == "true":
        # A part of a page that refreshes itself: the whole page has to show the login page.
        return Response(status_code=204, headers={"HX-Refresh": "true"})
    target = _page_before(request) if request.method == "POST" else str(request.url.path)
    if request.method != "POST" and request.url.query:
        target = f"{target}?{request.url.query}"
    return redirect(f"{LOGIN}?next={quote(return_path(target), safe='/')}")


def _page_before(request: Request) -> str:
    """The page that a form was on."""
    parts = urlsplit(request.headers.get("referer", ""))
    if parts.netloc != request.headers.get("host", ""):
        return "/"
    return return_path(f"{parts.path}?{parts.query}" if parts.query else parts.path)
