"""The tables of devices and enrolments."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table
from shared.protocol import DeviceView


class Device(Numbered, Table):
    """A device that enrolled."""

    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96), index=True)
    name: Mapped[str] = mapped_column(String(96))
    public_key: Mapped[str] = mapped_column(String(100))
    platform: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(Moment)
    last_seen_at: Mapped[datetime | None] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)

    def view(self) -> DeviceView:
        """As the API shows it."""
        return DeviceView(
            id=self.id,
            name=self.name,
            platform=self.platform,
            created_at=self.created_at,
            last_seen_at=self.last_seen_at,
            revoked_at=self.revoked_at,
        )


class EnrolmentToken(Numbered, Table):
    """A one-time token, by its digest."""

    __tablename__ = "enrolments"

    digest: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment)
    used_at: Mapped[datetime | None] = mapped_column(Moment)
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
