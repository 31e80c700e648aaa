"""Forms by which people decide about adapter versions; each does what the REST route of the same name does."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response

from server.dashboard.access import FORM_BODY, Fields, signed_in
from server.dashboard.pages import redirect
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import Visitor
from server.registry.decisions import DecisionService
from server.registry.endpoints import Version
from server.web.state import Writing
from shared.access import Scope
from shared.errors import BadRequest

router = PageRoutes(prefix="/ui/adapters/{name}")
Writer = Annotated[Visitor, signed_in(Scope.ADAPTERS_WRITE)]
MAX_REASON = 1000  # characters, as in `shared.registry.Decision`


def reason_of(form: Fields) -> str:
    """Returns the reason in a form. Raises BadRequest for one that is too long."""
    reason = form.get("reason", "").strip()
    if len(reason) > MAX_REASON:
        raise BadRequest(f"reason: has {len(reason)} characters; at most {MAX_REASON} are kept")
    return reason


@router.post("/versions/{version}/approve", openapi_extra=FORM_BODY)
def approve(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Approves a held version."""
    DecisionService.of(session, visitor.principal, name).approve(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}/versions/{version}", "approved")


@router.post("/versions/{version}/delete", openapi_extra=FORM_BODY)
def delete(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Deletes a version; it can be restored for some days."""
    DecisionService.of(session, visitor.principal, name).delete_version(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}", "deleted")


@router.post("/versions/{version}/promote", openapi_extra=FORM_BODY)
def promote(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Makes an approved version `main`."""
    DecisionService.of(session, visitor.principal, name).promote(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}/versions/{version}", "promoted")
