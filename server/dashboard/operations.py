"""Pages of operation: the server's readiness, storage and settings, tokens, webhooks, and the audit trail."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Response
from pydantic import SecretStr, ValidationError
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from server.dashboard.access import Fields, signed_in
from server.dashboard.devices import device_names
from server.dashboard.pages import Visitor, redirect
from server.dashboard.routes import PageRoutes
from server.database.paging import PageRequest
from server.identity.audit import AccessTrail
from server.identity.endpoints import TokenIssuingService
from server.operations.health import readiness, server_usage
from server.operations.tenant_usage import tenant_usage
from server.programs.service import ProgramRepository
from server.registry.models import AuditTrail, event_view
from server.settings import Settings
from server.tasks.sweeps import failing_sweeps
from server.web.pages import Paging
from server.web.state import Reading, State, Writing
from server.webhooks.repository import WebhookRepository
from server.webhooks.service import WebhookService
from shared.access import MAX_DAYS, Scope, TokenGrant, TokenRequest
from shared.errors import BadRequest

router = PageRoutes(prefix="/ui/operations")
TokenMaker = Annotated[Visitor, signed_in(Scope.TOKENS_WRITE)]
WebhookManager = Annotated[Visitor, signed_in(Scope.WEBHOOKS_WRITE)]
HIDDEN = "(hidden)"
ACCESS = 50  # entries about devices and logins
DELIVERIES = 20  # the latest of each webhook
SCOPE = "scope-"  # before a scope in the name of a form's checkbox


@router.get("")
def operations(visitor: Annotated[Visitor, signed_in()], state: State, session: Reading) -> Response:
    """The session and its tenant's quotas; with `server:read` also readiness, storage, programs and settings."""
    server: dict[str, Any] | None = None
    if visitor.may(Scope.SERVER_READ):
        server = {
            "checks": readiness(state),
            "disk": shutil.disk_usage(state.settings.home),
            "usage": server_usage(session, state.started_at),
            "programs": ProgramRepository(session).counts(),
            "sweeps": failing_sweeps(session),
            "settings": shown_settings(state.settings),
            "started_at": state.started_at,
            "version": version("mobizo"),
            "database": state.database.engine.dialect.name,
        }
    usages = tenant_usage(session, visitor.principal.tenant)
    return visitor.page("operations.html", "Operations", server=server, usages=usages)


def shown_settings(settings: Settings) -> list[tuple[str, str, str, bool]]:
    """Returns name, value, description and whether it was changed, of every setting; secrets are hidden."""
    rows = []
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        changed = value != field.get_default(call_default_factory=True)
        rows.append((f"MOBIZO_{name.upper()}", _display_text(name, value), field.description or "", changed))
    return rows


def _display_text(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, SecretStr):
        return HIDDEN
    if name == "database_url":
        return make_url(value).render_as_string(hide_password=True)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@router.get("/tokens")
def tokens(visitor: TokenMaker, session: Reading, paging: Paging) -> Response:
    """The tokens of the tenant's users and services, newest first."""
    return _tokens_page(visitor, session, paging)


def _tokens_page(visitor: Visitor, session: Session, paging: Paging, granted: TokenGrant | None = None) -> Response:
    """granted: a new token, which is shown this once."""
    return visitor.page(
        "tokens.html",
        "Tokens",
        listing=TokenIssuingService(session, visitor.principal).page(paging),
        granted=granted,
        offered=sorted(visitor.principal.scopes),
        max_days=MAX_DAYS,
    )


@router.post("/tokens")
def make_token(visitor: TokenMaker, form: Fields, session: Writing, paging: Paging) -> Response:
    """Creates a token, as POST /v1/tokens does, and shows it once."""
    fields = {
        "name": form.get("name", ""),
        "role": form.get("role"),
        "scopes": [field.removeprefix(SCOPE) for field in form if field.startswith(SCOPE)],
    }
    try:
        days = int(form["days"]) if form.get("days") else None
        token_request = TokenRequest.model_validate(fields | {"expires_in_days": days})
    except (ValidationError, ValueError) as error:
        raise BadRequest(
            f"choose a role and scopes, a name of at most 96 characters, and 1 to {MAX_DAYS} days"
        ) from error
    granted = TokenIssuingService(session, visitor.principal).make(token_request)
    return _tokens_page(visitor, session, paging, granted)


@router.post("/tokens/{token_id}/revoke")
def revoke(visitor: TokenMaker, form: Fields, token_id: str, session: Writing) -> Response:
    """Revokes a token, as DELETE /v1/tokens/ID does, and with it the sessions that it began."""
    TokenIssuingService(session, visitor.principal).revoke(token_id)
    return redirect("/ui/operations/tokens", "token-revoked")


@router.get("/webhooks")
def webhooks(visitor: WebhookManager, session: Reading, paging: Paging) -> Response:
    """The tenant's webhooks, newest first, each with its latest deliveries."""
    repository = WebhookRepository(session)
    rows = repository.page(visitor.principal.tenant, paging)
    latest = PageRequest(None, DELIVERIES)
    listing = paging.page([(row, repository.deliveries(row, latest).rows) for row in rows.rows], rows.before)
    return visitor.page("webhooks.html", "Webhooks", listing=listing)


@router.post("/webhooks/{webhook_id}/test")
def send_webhook_test(
    visitor: WebhookManager, form: Fields, webhook_id: str, state: State, session: Writing
) -> Response:
    """Sends the event `webhook.test` once, as POST /v1/webhooks/ID/test does."""
    WebhookService(session, state.settings, visitor.principal).test(webhook_id)
    return redirect("/ui/operations/webhooks", "webhook-test")


@router.get("/audit")
def audit(visitor: Annotated[Visitor, signed_in(Scope.ADAPTERS_READ)], session: Reading, paging: Paging) -> Response:
    """The actions of people, devices and the server on the tenant's adapters and cohorts, and access to the tenant."""
    rows = AuditTrail(session).of_tenant(visitor.principal.tenant, paging)
    listing = paging.page([(row.adapter, event_view(row)) for row in rows.rows], rows.before)
    access = None
    if visitor.may(Scope.DEVICES_READ):
        access = AccessTrail(session).page(visitor.principal.tenant, PageRequest(None, ACCESS)).rows
    names = device_names(session, visitor, [row.actor for row in rows.rows])
    return visitor.page("audit.html", "Audit trail", listing=listing, names=names, access=access)
