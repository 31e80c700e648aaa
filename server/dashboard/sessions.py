"""Sessions of people who signed in with a token: their table, SQL and rules.

A session is a random secret in a cookie, of which only the digest is stored. It refers to the token that it was begun
with and ends with it: when the token expires or is revoked, when its user is disabled or its tenant suspended, after
`SESSION_HOURS`, or when the person signs out.

A form carries a CSRF token: a nonce and its HMAC by the secret. The nonce is new for each page, so that a compressed
page reveals nothing of the secret.
"""

from __future__ import annotations

import hmac
import re
import secrets
from datetime import datetime, timedelta
from hashlib import sha256

from sqlalchemy import ForeignKey, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, utc_now
from server.identity.tokens import Principal, Token, TokenService, token_digest
from shared.access import Role
from shared.errors import Forbidden, Unauthorized

SESSION_HOURS = 12
NONCE_DIGITS = 16
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
ENDED = "the session has ended; sign in again"


class WebSession(Numbered, Table):
    """A session, by the digest of its secret."""

    __tablename__ = "sessions"

    digest: Mapped[str] = mapped_column(String(64), unique=True)
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.id"))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime] = mapped_column(UtcTime, index=True)


def new_secret() -> str:
    """Returns the secret of a new session: 256 random bits."""
    return secrets.token_urlsafe(32)


def is_secret(text: str) -> bool:
    """Whether a cookie has the form of a secret."""
    return _SECRET.fullmatch(text) is not None


def session_digest(secret: str) -> str:
    """Returns the stored digest of a session's secret, which differs from that of a token with the same text."""
    return token_digest(f"session:{secret}")


def csrf_token(secret: str) -> str:
    """Returns a CSRF token for one page of a session."""
    nonce = secrets.token_hex(NONCE_DIGITS // 2)
    return nonce + _mac(secret, nonce)


def is_csrf_token(secret: str, token: str) -> bool:
    """Whether a form's CSRF token was made with this session's secret."""
    nonce, mac = token[:NONCE_DIGITS], token[NONCE_DIGITS:]
    return token.isascii() and hmac.compare_digest(mac, _mac(secret, nonce))


def _mac(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), f"csrf:{nonce}".encode(), sha256).hexdigest()


class SessionService:
    """Sessions in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tokens = TokenService(session)

    def begin(self, token: str) -> tuple[str, datetime]:
        """Begins a session; returns its secret and its end.

        Raises Unauthorized for a token that is not valid, TenantSuspended, or Forbidden for a device's token.
        """
        principal = self._tokens.principal(token)
        if principal.role is Role.DEVICE:
            raise Forbidden("a device's token cannot sign in here; use an operator's or an app's")
        secret, now = new_secret(), utc_now()
        expires = now + timedelta(hours=SESSION_HOURS)
        if principal.expires_at is not None:
            expires = min(expires, principal.expires_at)
        self._session.execute(delete(WebSession).where(WebSession.expires_at <= now))
        row = WebSession(digest=session_digest(secret), token_id=principal.token_id, created_at=now, expires_at=expires)
        self._session.add(row)
        return secret, expires

    def principal(self, secret: str) -> tuple[Principal, str]:
        """Returns whose session it is and the digest of their token. Raises Unauthorized, TenantSuspended."""
        statement = (
            select(Token.digest)
            .join(WebSession, WebSession.token_id == Token.id)
            .where(WebSession.digest == session_digest(secret), WebSession.expires_at > utc_now())
        )
        digest = self._session.scalar(statement)
        if digest is None:
            raise Unauthorized(ENDED)
        return self._tokens.principal_of(digest), digest

    def end(self, secret: str) -> None:
        """Ends a session at once."""
        self._session.execute(delete(WebSession).where(WebSession.digest == session_digest(secret)))
