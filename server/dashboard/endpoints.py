"""All routes of the dashboard: signing out, static files, the API's reference, and the pages of its parts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response

from server.dashboard import (
    adapters,
    cohorts,
    devices,
    jobs,
    operations,
    overview,
    programs,
    runs,
    sign_in,
)
from server.dashboard.access import COOKIE, Fields, signed_in
from server.dashboard.assets import asset_response
from server.dashboard.pages import CONTENT_POLICY, LOGIN, Visitor, page, redirect
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import SessionService
from server.identity.access_rules import PUBLIC
from server.web.state import State
from shared.errors import NotFound

# Swagger UI sets styles of elements, and its style sheet contains images.
SWAGGER_POLICY = f"{CONTENT_POLICY}; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
pages = PageRoutes()


@pages.post("/ui/logout")
async def logout(visitor: Annotated[Visitor, signed_in()], form: Fields, state: State) -> Response:
    """Ends the session."""
    await state.write_queue.transact(lambda session: SessionService(session).end(visitor.secret))
    response = redirect(LOGIN, "signed-out")
    response.delete_cookie(COOKIE, path="/")
    return response


@pages.get("/ui/static/{name}", dependencies=[PUBLIC])
async def static_file(request: Request, name: str) -> Response:
    """A static file of the pages."""
    return asset_response(request, name)


@pages.get("/docs", dependencies=[PUBLIC])
async def api_reference(request: Request) -> Response:
    """The API's reference, which Swagger UI makes from /openapi.json in the browser."""
    response = page(request, None, "docs.html", "API")
    response.headers["Content-Security-Policy"] = SWAGGER_POLICY
    return response


@pages.get("/ui/{anything}")
async def unknown_page(visitor: Annotated[Visitor, signed_in()], anything: str) -> Response:
    """Says that there is no such page, to people with a session only."""
    raise NotFound("there is no such page")


router = PageRoutes()
# In the order in which they are tried.
for part in (overview, jobs, runs, devices, adapters, cohorts, programs, operations, sign_in):
    router.routes += part.router.routes
router.routes += pages.routes
