"""Tables of devices, enrollment tokens and device authorization requests, and the cooldown of devices that fail."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, RootModel
from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from server.clock import utc_now
from server.database.columns import Document, Moment, Numbered, Table, word
from shared.capabilities import Capabilities, Labels
from shared.protocol import DeviceView

FAILURES_BEFORE_COOLDOWN = 3  # in a row
FIRST_COOLDOWN, LONGEST_COOLDOWN = timedelta(minutes=1), timedelta(hours=1)


class LabelSet(RootModel[Labels]):
    """Labels that an operator gave to a device."""


class UserNames(RootModel[tuple[str, ...]]):
    """Users whose data is on a device that is about to enroll."""


class DeviceReport(BaseModel):
    """What a device reported about itself with its last request for a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    datasets: tuple[str, ...]
    memory_bytes: int | None = None
    capabilities: Capabilities | None = None

    def lasting(self) -> DeviceReport:
        """Returns the report without the values that change from minute to minute."""
        passing = {"charging": None, "battery_percent": None}
        can = self.capabilities and self.capabilities.model_copy(update=passing)
        return DeviceReport(datasets=self.datasets, capabilities=can)


class Device(Numbered, Table):
    """An enrolled device."""

    __tablename__ = "devices"
    __table_args__ = (Index("ix_devices_tenant", "tenant", "number"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    name: Mapped[str] = mapped_column(String(96))
    public_key: Mapped[str] = mapped_column(String(100))
    platform: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(Moment)
    last_seen_at: Mapped[datetime | None] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)
    labels: Mapped[LabelSet] = mapped_column(Document(LabelSet), default=lambda: LabelSet({}), server_default="{}")
    report: Mapped[DeviceReport | None] = mapped_column(Document(DeviceReport))
    failures: Mapped[int] = mapped_column(default=0, server_default="0")  # unfinished jobs in a row
    cooldown_until: Mapped[datetime | None] = mapped_column(Moment)  # gets no new job before

    def view(self, users: Sequence[str]) -> DeviceView:
        """As the API shows it. users: those bound to it."""
        report = self.report or DeviceReport(datasets=())
        return DeviceView(
            id=self.id,
            name=self.name,
            platform=self.platform,
            created_at=self.created_at,
            last_seen_at=self.last_seen_at,
            revoked_at=self.revoked_at,
            labels=self.labels.root,
            users=list(users),
            datasets=list(report.datasets),
            memory_bytes=report.memory_bytes,
            capabilities=report.capabilities,
            failures=self.failures,
            cooldown_until=self.cooldown_until,
        )


class DeviceUser(Table):
    """A user whose data is on a device. A device trains jobs of its users only; its row guards these rows."""

    __tablename__ = "device_users"
    __table_args__ = (Index("ix_device_users_user", "user", "device_id"),)

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    user: Mapped[str] = mapped_column(String(96), primary_key=True)
    bound_at: Mapped[datetime] = mapped_column(Moment)


class EnrollmentToken(Numbered, Table):
    """A one-time token, by its digest."""

    __tablename__ = "enrollments"

    digest: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment)
    used_at: Mapped[datetime | None] = mapped_column(Moment)
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    users: Mapped[UserNames] = mapped_column(
        Document(UserNames), default=lambda: UserNames(()), server_default="[]"
    )  # bound to the device when it is enrolled


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
    users: Mapped[UserNames] = mapped_column(
        Document(UserNames), default=lambda: UserNames(()), server_default="[]"
    )  # bound to the device when it is enrolled


class DeviceNonce(Table):
    """A nonce that a device's signed request has spent, kept as long as its signature would be good."""

    __tablename__ = "device_nonces"

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    nonce: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(Moment)


def count_failure(device: Device, now: datetime) -> None:
    """Counts a failed job or an expired lease. From the third in a row on, the cooldown doubles."""
    device.failures += 1
    if device.failures >= FAILURES_BEFORE_COOLDOWN:
        doublings = min(device.failures - FAILURES_BEFORE_COOLDOWN, 10)
        device.cooldown_until = now + min(FIRST_COOLDOWN * 2**doublings, LONGEST_COOLDOWN)


def forget_failure(device: Device) -> None:
    """Takes back the last failure: the device resumed the job whose lease had expired."""
    device.failures = max(device.failures - 1, 0)
    device.cooldown_until = None


def forget_failures(device: Device) -> None:
    """Ends the cooldown after a finished job."""
    device.failures, device.cooldown_until = 0, None


def is_cooling_down(until: datetime | None) -> bool:
    """Whether a device gets no new job now."""
    return until is not None and until > utc_now()
