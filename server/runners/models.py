"""The table of runner builds."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table
from shared.protocol import SignedRunner


class Runner(Numbered, Table):
    """The build that devices of one platform get. Belongs to the server, not to a tenant."""

    __tablename__ = "runners"

    platform: Mapped[str] = mapped_column(String(100), unique=True)
    signed: Mapped[SignedRunner] = mapped_column(Document(SignedRunner))
    added_at: Mapped[datetime] = mapped_column(Moment)
