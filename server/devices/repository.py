"""All SQL about devices and enrolments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from server.db.paging import PageRequest, PageRows, page_of
from server.devices.models import Device, EnrolmentToken, Told
from shared.capabilities import Labels


class DeviceRepository:
    """Devices in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, device: Device) -> None:
        """Stores a new device."""
        self._session.add(device)
        self._session.flush()

    def get(self, tenant: str, device_id: str) -> Device | None:
        """A device of a tenant."""
        return self._session.scalar(select(Device).where(Device.tenant == tenant, Device.id == device_id))

    def standing(self, device_id: str) -> tuple[Labels, datetime | None, datetime | None]:
        """(labels, when it was revoked, until when it rests) of a device that is known to exist."""
        columns = select(Device.labels, Device.revoked_at, Device.rests_until)
        labels, revoked_at, rests_until = self._session.execute(columns.where(Device.id == device_id)).one()
        return labels.root, revoked_at, rests_until

    def named(self, tenant: str, name: str) -> Sequence[Device]:
        """Devices of a tenant that go by a name and were not revoked."""
        statement = select(Device).where(Device.tenant == tenant, Device.name == name, Device.revoked_at.is_(None))
        return self._session.scalars(statement).all()

    def all(self, tenant: str) -> Sequence[Device]:
        """Every device of a tenant, oldest first."""
        return self._session.scalars(select(Device).where(Device.tenant == tenant).order_by(Device.number)).all()

    def page(self, tenant: str, request: PageRequest) -> PageRows[Device]:
        """Some of a tenant's devices, newest first."""
        return page_of(self._session, select(Device).where(Device.tenant == tenant), Device, request)

    def seen(self, device_id: str, now: datetime, told: Told | None = None) -> None:
        """Notes that a device was heard from, and what it said of itself."""
        values: dict[str, Any] = {"last_seen_at": now} | ({} if told is None else {"told": told})
        self._session.execute(update(Device).where(Device.id == device_id).values(**values))

    def newest(self, tenant: str, limit: int) -> Sequence[Device]:
        """Devices of a tenant that were not revoked, those who enrolled last first."""
        statement = select(Device).where(Device.tenant == tenant, Device.revoked_at.is_(None))
        return self._session.scalars(statement.order_by(Device.number.desc()).limit(limit)).all()

    def by_id(self, device_id: str) -> Device:
        """A device that is known to exist."""
        return self._session.scalars(select(Device).where(Device.id == device_id)).one()


class EnrolmentRepository:
    """One-time tokens in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, enrolment: EnrolmentToken) -> None:
        """Stores a new one-time token."""
        self._session.add(enrolment)
        self._session.flush()

    def take(self, digest: str, now: datetime) -> EnrolmentToken | None:
        """Uses a token up; None if there is none, it is used or it is over. Of two at once, one gets it."""
        statement = (
            update(EnrolmentToken)
            .where(EnrolmentToken.digest == digest, EnrolmentToken.used_at.is_(None), EnrolmentToken.expires_at > now)
            .values(used_at=now)
            .returning(EnrolmentToken)
        )
        return self._session.scalar(statement)
