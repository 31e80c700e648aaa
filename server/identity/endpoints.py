"""Tokens that the holder of a token creates, lists and revokes, within its tenant and its own permissions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import Response
from sqlalchemy.orm import Session

from server.database.columns import utc_now, view_of
from server.identity.access_rules import needs
from server.identity.devices.service import check_tokens
from server.identity.tenants import UserService
from server.identity.tokens import TOKEN_DAYS, Principal, Token, TokenService
from server.web.idempotency import Once
from server.web.openapi import raises
from server.web.pages import Pages, Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope, TokenGrant, TokenRequest, TokenView, WhoAmI, default_scopes
from shared.errors import Conflict, Forbidden, NotFound, QuotaExceeded
from shared.protocol import Page

router = Routes(prefix="/v1", tags=["access"])
Maker = Annotated[Principal, needs(Scope.TOKENS_WRITE)]
_SECRET = {"Cache-Control": "no-store"}


class TokenIssuingService:
    """Issues, lists and revokes tokens on behalf of one token's holder, in one transaction."""

    def __init__(self, session: Session, maker: Principal) -> None:
        self._session, self._maker = session, maker
        self._tokens = TokenService(session)
        self._users = UserService(session)

    def make(self, request: TokenRequest) -> TokenGrant:
        """Creates a token of the named user, or of the maker's user.

        It expires with the maker's token at the latest.

        Raises Forbidden for scopes that the maker's token lacks and for a longer life, BadRequest for what no token of
        the role or the user can have, NotFound for an unknown user, Conflict for a disabled one, QuotaExceeded.
        """
        if request.scopes is None:
            scopes = default_scopes(request.role, self._maker.tenant) & self._maker.scopes
        else:
            scopes = frozenset(request.scopes)
        if excess := scopes - self._maker.scopes:
            raise Forbidden(
                f"a token may do no more than its maker's, which lacks: {', '.join(sorted(excess))}",
                missing=sorted(excess),
            )
        days = TOKEN_DAYS if request.expires_in_days is None else request.expires_in_days
        lifetime = None if days == "never" else timedelta(days=days)
        if request.expires_in_days is not None and self._within_maker(lifetime) != lifetime:
            raise Forbidden(
                f"a token may not outlive its maker's, which expires at {self._maker.expires_at}; ask for less, or "
                "leave expires_in_days out"
            )
        token, text = self._tokens.make(
            self._maker.tenant,
            request.role,
            request.name,
            scopes=scopes,
            lifetime=self._within_maker(lifetime),
            user=request.user or self._maker.user,
        )
        check_tokens(self._session, self._maker.tenant)
        return TokenGrant(token=text, view=self._views([token])[0])

    def revoke(self, token_id: str) -> None:
        """Revokes a token at once. Raises NotFound."""
        self._tokens.revoke(self._tokens.of_tenant(self._maker.tenant, token_id).id)

    def page(self, paging: Pages) -> Page[TokenView]:
        """Returns a page of the tenant's tokens, revoked and expired ones too, but not devices'; newest first."""
        page_rows = self._tokens.page(self._maker.tenant, paging)
        return paging.page(self._views(page_rows.rows), page_rows.before)

    def _within_maker(self, lifetime: timedelta | None) -> timedelta | None:
        """Returns a lifetime that ends with the maker's token at the latest; None: it never expires."""
        if self._maker.expires_at is None:
            return lifetime
        remaining = self._maker.expires_at - utc_now()
        return remaining if lifetime is None else min(lifetime, remaining)

    def _views(self, tokens: Sequence[Token]) -> list[TokenView]:
        names = self._users.names({token.user_id for token in tokens if token.user_id})
        return [
            view_of(TokenView, token, scopes=sorted(token.scopes), user=names.get(token.user_id or ""))
            for token in tokens
        ]


@router.get("/whoami")
def get_caller(principal: Annotated[Principal, needs(or_device=True)]) -> WhoAmI:
    """The holder of the request's token, and what the token allows."""
    return view_of(WhoAmI, principal, scopes=sorted(principal.scopes))


@router.get("/tokens")
def list_tokens(principal: Maker, session: Reading, paging: Paging) -> Page[TokenView]:
    """The tokens of the tenant's users and services, newest first, including revoked and expired ones."""
    return TokenIssuingService(session, principal).page(paging)


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
