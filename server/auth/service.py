"""Issuing, checking and revoking tokens. Knows no HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.auth.models import Role, Token
from server.auth.repository import TokenRepository
from server.clock import utc_now
from server.identity import new_id, new_token, token_digest
from shared.errors import BadRequest, NotFound, Unauthorized
from shared.job import NAME

DEFAULT_TENANT = "default"
REVOKED = "this device was revoked; ask the operator for a one-time token and enrol it again"


@dataclass(frozen=True)
class Principal:
    """Who makes a request."""

    tenant: str
    role: Role
    token_id: str
    device_id: str | None


class TokenService:
    """Tokens in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tokens = TokenRepository(session)

    def issue(self, role: Role, tenant: str, name: str, device_id: str | None = None) -> tuple[Token, str]:
        """A new token: its record, and the text that is shown once. Raises BadRequest for a bad tenant name."""
        if not re.fullmatch(NAME, tenant):
            raise BadRequest(f"tenant {tenant!r} must match {NAME}")
        text = new_token(role)
        token = Token(
            id=new_id("token"),
            digest=token_digest(text),
            role=role,
            tenant=tenant,
            name=name,
            device_id=device_id,
            created_at=utc_now(),
        )
        self._tokens.add(token)
        return token, text

    def principal(self, text: str) -> Principal:
        """Whose token this is. Raises Unauthorized if nobody's."""
        token = self._tokens.by_digest(token_digest(text))
        if token is not None and token.revoked_at is not None and token.role is Role.DEVICE:
            raise Unauthorized(REVOKED)
        if token is None or token.revoked_at is not None:
            raise Unauthorized("the token is not known here or was revoked; ask the operator for a new one")
        return Principal(token.tenant, token.role, token.id, token.device_id)

    def revoke_device(self, device_id: str) -> None:
        """Ends every token of a device at once."""
        self._tokens.revoke_device(device_id, utc_now())

    def revoke(self, token_id: str) -> None:
        """Ends a token at once. Raises NotFound."""
        if not self._tokens.revoke(token_id, utc_now()):
            raise NotFound(f"no live token has id {token_id!r}; `mobizo-server tokens list` shows them")
