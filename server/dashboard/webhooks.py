"""The page of webhooks, with their latest deliveries."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response

from server.dashboard.access import FORM_BODY, Fields, signed_in
from server.dashboard.pages import page, redirect
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import Visitor
from server.database.paging import PageRequest
from server.web.pages import Paging
from server.web.state import Reading, State, Writing
from server.webhooks.repository import WebhookRepository
from server.webhooks.service import WebhookService
from shared.access import Scope

router = PageRoutes(prefix="/ui/operations/webhooks")
DELIVERIES = 20  # the latest of each webhook


@router.get("")
def webhooks(
    request: Request, visitor: Annotated[Visitor, signed_in(Scope.WEBHOOKS_WRITE)], session: Reading, paging: Paging
) -> Response:
    """The tenant's webhooks, newest first, each with its latest deliveries."""
    repository = WebhookRepository(session)
    rows = repository.page(visitor.principal.tenant, paging)
    latest = PageRequest(None, DELIVERIES)
    listing = paging.page([(row, repository.deliveries(row, latest).rows) for row in rows.rows], rows.before)
    return page(request, visitor, "webhooks.html", "Webhooks", listing=listing)


@router.post("/{webhook_id}/test", openapi_extra=FORM_BODY)
def send_webhook_test(
    visitor: Annotated[Visitor, signed_in(Scope.WEBHOOKS_WRITE)],
    form: Fields,
    webhook_id: str,
    state: State,
    session: Writing,
) -> Response:
    """Sends the event `webhook.test` once, as POST /v1/webhooks/ID/test does."""
    WebhookService(session, state.settings, visitor.principal).test(webhook_id)
    return redirect("/ui/operations/webhooks", "webhook-test")
