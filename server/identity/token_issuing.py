"""Tokens that the holder of a token creates, lists and revokes, within its tenant and its own permissions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.paging import PageRequest, PageRows
from server.identity.devices.service import check_tokens
from server.identity.tenants import UserService
from server.identity.tokens import TOKEN_DAYS, Principal, Token, TokenRepository, TokenService
from shared.access import Scope, TokenGrant, TokenRequest, TokenView, default_scopes
from shared.errors import Forbidden, NotFound


class TokenIssuingService:
    """Issues, lists and revokes tokens on behalf of one token's holder, in one transaction."""

    def __init__(self, session: Session, maker: Principal) -> None:
        self._session, self._maker = session, maker
        self._service = TokenService(session)
        self._tokens = TokenRepository(session)
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
        self._check_reach(scopes)
        days = TOKEN_DAYS if request.expires_in_days is None else request.expires_in_days
        lifetime = None if days == "never" else timedelta(days=days)
        if request.expires_in_days is not None and self._within_maker(lifetime) != lifetime:
            raise Forbidden(
                f"a token may not outlive its maker's, which expires at {self._maker.expires_at}; ask for less, or "
                "leave expires_in_days out"
            )
        token, text = self._service.make(
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
        self._service.revoke(self._get(token_id).id)

    def page(self, request: PageRequest) -> tuple[list[TokenView], PageRows[Token]]:
        """Returns a page of the tenant's tokens, revoked and expired ones too, but not devices'; newest first."""
        page_rows = self._tokens.page(self._maker.tenant, request)
        return self._views(page_rows.rows), page_rows

    def _get(self, token_id: str) -> Token:
        token = self._tokens.of_tenant(self._maker.tenant, token_id)
        if token is None:
            raise NotFound(f"there is no token {token_id}")
        return token

    def _check_reach(self, scopes: frozenset[Scope]) -> None:
        if excess := scopes - self._maker.scopes:
            raise Forbidden(
                f"a token may do no more than its maker's, which lacks: {', '.join(sorted(excess))}",
                missing=sorted(excess),
            )

    def _within_maker(self, lifetime: timedelta | None) -> timedelta | None:
        """Returns a lifetime that ends with the maker's token at the latest; None: it never expires."""
        if self._maker.expires_at is None:
            return lifetime
        remaining = self._maker.expires_at - utc_now()
        return remaining if lifetime is None else min(lifetime, remaining)

    def _views(self, tokens: Sequence[Token]) -> list[TokenView]:
        names = self._users.names({token.user_id for token in tokens if token.user_id})
        return [
            TokenView(
                id=token.id,
                name=token.name,
                role=token.role,
                scopes=sorted(token.scopes),
                user=names.get(token.user_id or ""),
                created_at=token.created_at,
                expires_at=token.expires_at,
                last_used_at=token.last_used_at,
                revoked_at=token.revoked_at,
            )
            for token in tokens
        ]
