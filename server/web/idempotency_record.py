"""The table of stored responses."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import LargeBinary, String, delete
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime


class IdempotencyRecord(Numbered, Table):
    """The response to one request. `id` is a digest of its token and Idempotency-Key, neither of which is stored."""

    __tablename__ = "kept_answers"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    kept_until: Mapped[datetime] = mapped_column(UtcTime, index=True)


def purge_records(session: Session, now: datetime) -> None:
    """Removes the responses whose time is over."""
    session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.kept_until <= now))
