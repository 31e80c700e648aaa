"""All SQL about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from server.auth.models import Token


class TokenRepository:
    """Tokens in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, token: Token) -> None:
        """Stores a new token."""
        self._session.add(token)
        self._session.flush()

    def by_digest(self, digest: str) -> Token | None:
        """The token of that digest, live or revoked."""
        return self._session.scalar(select(Token).where(Token.digest == digest))

    def all(self) -> Sequence[Token]:
        """Every token, oldest first."""
        return self._session.scalars(select(Token).order_by(Token.number)).all()

    def revoke_device(self, device_id: str, now: datetime) -> None:
        """Ends every token of a device."""
        live = update(Token).where(Token.device_id == device_id, Token.revoked_at.is_(None))
        self._session.execute(live.values(revoked_at=now))

    def revoke(self, token_id: str, now: datetime) -> bool:
        """Ends a token; False if there is no live one of that id."""
        live = update(Token).where(Token.id == token_id, Token.revoked_at.is_(None))
        return self._session.scalar(live.values(revoked_at=now).returning(Token.id)) is not None
