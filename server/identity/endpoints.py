"""Routes of tokens, and the route that describes the caller's own token."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response

from server.identity.access_rules import needs
from server.identity.token_issuing import TokenIssuingService
from server.identity.tokens import Principal
from server.web.idempotency import Once
from server.web.openapi import raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope, TokenGrant, TokenRequest, TokenView, WhoAmI
from shared.errors import Conflict, NotFound, QuotaExceeded
from shared.protocol import Page

router = Routes(prefix="/v1", tags=["access"])
Maker = Annotated[Principal, needs(Scope.TOKENS_WRITE)]
_SECRET = {"Cache-Control": "no-store"}


@router.get("/whoami")
def get_caller(principal: Annotated[Principal, needs(or_device=True)]) -> WhoAmI:
    """The holder of the request's token, and what the token allows."""
    return WhoAmI(
        tenant=principal.tenant,
        role=principal.role,
        token_id=principal.token_id,
        name=principal.name,
        user=principal.user,
        device_id=principal.device_id,
        scopes=sorted(principal.scopes),
        expires_at=principal.expires_at,
    )


@router.get("/tokens")
def list_tokens(principal: Maker, session: Reading, paging: Paging) -> Page[TokenView]:
    """The tokens of the tenant's users and services, newest first, including revoked and expired ones."""
    views, page_rows = TokenIssuingService(session, principal).page(paging)
    return paging.page(views, page_rows.before)


@router.post("/tokens", status_code=201, responses=raises(NotFound, Conflict, QuotaExceeded))
def create_token(
    principal: Maker, request: TokenRequest, response: Response, state: State, session: Writing, once: Once
) -> TokenGrant:
    """Creates a token in the caller's tenant, which may do no more than the caller's; its text is shown only once."""
    response.headers.update(_SECRET)
    return TokenIssuingService(session, principal).make(request)


@router.delete("/tokens/{token_id}", status_code=204, responses=raises(NotFound))
def revoke_token(principal: Maker, token_id: str, session: Writing) -> None:
    """Revokes a token at once; it may be the caller's own."""
    TokenIssuingService(session, principal).revoke(token_id)
