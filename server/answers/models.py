"""The table of kept answers."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table


class KeptAnswer(Numbered, Table):
    """What one request was answered; `id` is made of its token and its Idempotency-Key, neither of which is kept."""

    __tablename__ = "kept_answers"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    kept_until: Mapped[datetime] = mapped_column(Moment, index=True)
