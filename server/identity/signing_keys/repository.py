"""All SQL about the server's keys."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.identity.signing_keys.models import ServerKey


class KeyRepository:
    """Keys in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, key: ServerKey) -> None:
        """Stores the key that signs from now on."""
        self._session.add(key)
        self._session.flush()

    def current(self) -> ServerKey | None:
        """The key that signs now; None while the home's first key was never written down."""
        return self._session.scalar(select(ServerKey).order_by(ServerKey.number.desc()).limit(1))

    def held(self, *, changing: bool) -> ServerKey | None:
        """The key that signs now, and does until this transaction ends. changing: and nobody else looks meanwhile."""
        statement = select(ServerKey).order_by(ServerKey.number.desc()).limit(1)
        found = self._session.scalar(statement.with_for_update(read=not changing))
        latest = self.current()
        # Whoever held it may have put another in its place while this waited.
        return found if latest is None or found is latest else self.held(changing=changing)

    def all(self) -> Sequence[ServerKey]:
        """Every key, oldest first."""
        return self._session.scalars(select(ServerKey).order_by(ServerKey.number)).all()
