"""The tables of devices, and of the ways in: one-time tokens, and requests that an operator decides on."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table, word
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


class RequestState(StrEnum):
    """What became of a device's request to join."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    USED = "used"  # approved, and the device has its token


class DeviceRequest(Numbered, Table):
    """A device that asks to join (RFC 8628): it holds the device code, a person reads the user code to an operator."""

    __tablename__ = "device_requests"

    device_code_digest: Mapped[str] = mapped_column(String(64), unique=True)
    user_code: Mapped[str] = mapped_column(String(16), unique=True)  # without its dash
    client_id: Mapped[str] = mapped_column(String(100))
    name: Mapped[str] = mapped_column(String(96))
    public_key: Mapped[str] = mapped_column(String(100))
    platform: Mapped[str] = mapped_column(String(200))
    address: Mapped[str] = mapped_column(String(64), index=True)  # that it asked from
    state: Mapped[RequestState] = mapped_column(word(RequestState))
    interval_seconds: Mapped[int] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment, index=True)
    polled_at: Mapped[datetime | None] = mapped_column(Moment)
    tenant: Mapped[str | None] = mapped_column(String(96))  # the operator's, once one decided
    decided_by: Mapped[str | None] = mapped_column(String(64))  # the operator's token
    decided_at: Mapped[datetime | None] = mapped_column(Moment)
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))


class DeviceNonce(Table):
    """A nonce that a device's signed request has spent, kept as long as its signature would be good."""

    __tablename__ = "device_nonces"

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    nonce: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(Moment)
