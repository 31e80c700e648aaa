"""Routes of webhooks and their deliveries."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response
from sqlalchemy.orm import Session

from server.database.columns import view_of
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.web.idempotency import Once
from server.web.openapi import raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import AppState, Reading, State, Writing
from server.webhooks.repository import WebhookRepository
from server.webhooks.sending import WebhookAddressRefused
from server.webhooks.service import WebhookService
from shared.access import Scope
from shared.errors import Conflict, Forbidden, NotFound, QuotaExceeded
from shared.protocol import Page
from shared.webhooks import DeliveryView, WebhookGrant, WebhookRequest, WebhookView

router = Routes(prefix="/v1/webhooks", tags=["webhooks"])
Manager = Annotated[Principal, needs(Scope.WEBHOOKS_WRITE)]


def _service(session: Session, state: AppState, principal: Principal) -> WebhookService:
    return WebhookService(session, state.settings, principal)


@router.post("", status_code=201, responses=raises(Forbidden, WebhookAddressRefused, QuotaExceeded))
def create_webhook(
    principal: Manager, request: WebhookRequest, response: Response, state: State, session: Writing, once: Once
) -> WebhookGrant:
    """Creates a webhook; its secret is shown only once. Its events need the scopes of the routes with the same data."""
    response.headers["Cache-Control"] = "no-store"
    webhook, secret = _service(session, state, principal).create(request)
    return WebhookGrant(secret=secret, view=view_of(WebhookView, webhook))


@router.get("")
def list_webhooks(principal: Manager, session: Reading, paging: Paging) -> Page[WebhookView]:
    """Lists the tenant's webhooks, newest first, including disabled ones."""
    page_rows = WebhookRepository(session).page(principal.tenant, paging)
    return paging.page([view_of(WebhookView, row) for row in page_rows.rows], page_rows.before)


@router.get("/{webhook_id}", responses=raises(NotFound))
def get_webhook(principal: Manager, webhook_id: str, state: State, session: Reading) -> WebhookView:
    """Returns a webhook."""
    return view_of(WebhookView, _service(session, state, principal).get(webhook_id))


@router.delete("/{webhook_id}", status_code=204, responses=raises(NotFound))
def delete_webhook(principal: Manager, webhook_id: str, state: State, session: Writing) -> None:
    """Deletes a webhook and its deliveries at once."""
    WebhookRepository(session).delete(_service(session, state, principal).get(webhook_id))


@router.post("/{webhook_id}/test", status_code=202, responses=raises(NotFound, Conflict))
def test_webhook(principal: Manager, webhook_id: str, state: State, session: Writing, once: Once) -> DeliveryView:
    """Sends the event `webhook.test` once, also to a disabled webhook, which is enabled again if the test succeeds."""
    return view_of(DeliveryView, _service(session, state, principal).test(webhook_id))


@router.get("/{webhook_id}/deliveries", responses=raises(NotFound))
def list_deliveries(
    principal: Manager, webhook_id: str, state: State, session: Reading, paging: Paging
) -> Page[DeliveryView]:
    """Lists the messages of a webhook with the outcome of their latest attempt, newest first."""
    webhook = _service(session, state, principal).get(webhook_id)
    page_rows = WebhookRepository(session).deliveries(webhook, paging)
    return paging.page([view_of(DeliveryView, row) for row in page_rows.rows], page_rows.before)
