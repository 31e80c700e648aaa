"""The tokens table."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table, word


class Role(StrEnum):
    """What a token's holder is."""

    OPERATOR = "operator"  # runs the fleet of its tenant; may also do all that an app may
    APP = "app"
    DEVICE = "device"


class Token(Numbered, Table):
    """A bearer token, by its digest."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[Role] = mapped_column(word(Role))
    tenant: Mapped[str] = mapped_column(String(96))
    name: Mapped[str] = mapped_column(String(96))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    created_at: Mapped[datetime] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)
