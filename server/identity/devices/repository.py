"""All SQL about devices, what they sign, and the ways in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert as insert_postgresql
from sqlalchemy.dialects.sqlite import insert as insert_sqlite
from sqlalchemy.orm import Session

from server.database.locking import add_if_absent, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.devices.models import (
    Device,
    DeviceNonce,
    DeviceReport,
    DeviceRequest,
    DeviceUser,
    EnrollmentToken,
    RequestState,
)

# Built once, because every request for a job executes it.
_USERS = select(DeviceUser.user).where(DeviceUser.device_id == bindparam("device_id"))


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

    def get_locked(self, tenant: str, device_id: str) -> Device | None:
        """A device of a tenant, locked until the transaction ends."""
        return self._session.scalar(locked(select(Device).where(Device.tenant == tenant, Device.id == device_id)))

    def named(self, tenant: str, name: str) -> Sequence[Device]:
        """Devices of a tenant that go by a name and were not revoked."""
        statement = select(Device).where(Device.tenant == tenant, Device.name == name, Device.revoked_at.is_(None))
        return self._session.scalars(statement).all()

    def all(self, tenant: str) -> Sequence[Device]:
        """Every device of a tenant, oldest first."""
        return self._session.scalars(select(Device).where(Device.tenant == tenant).order_by(Device.number)).all()

    def live(self) -> Sequence[Device]:
        """Every device of every tenant that was not revoked."""
        return self._session.scalars(select(Device).where(Device.revoked_at.is_(None)).order_by(Device.number)).all()

    def page(self, tenant: str, request: PageRequest) -> PageRows[Device]:
        """Some of a tenant's devices, newest first."""
        return page_of(self._session, select(Device).where(Device.tenant == tenant), Device, request)

    def seen(self, device_id: str, now: datetime, report: DeviceReport | None = None) -> None:
        """Notes that a device was heard from, and what it said of itself."""
        values: dict[str, Any] = {"last_seen_at": now} | ({} if report is None else {"report": report})
        self._session.execute(update(Device).where(Device.id == device_id).values(**values))

    def newest(self, tenant: str, limit: int) -> Sequence[Device]:
        """Devices of a tenant that were not revoked, those who enrolled last first."""
        statement = select(Device).where(Device.tenant == tenant, Device.revoked_at.is_(None))
        return self._session.scalars(statement.order_by(Device.number.desc()).limit(limit)).all()

    def by_id(self, device_id: str) -> Device:
        """A device that is known to exist."""
        return self._session.scalars(select(Device).where(Device.id == device_id)).one()

    def unless_busy(self, device_id: str) -> Device | None:
        """A device that is known to exist, locked; None if another transaction has it, as while it asks for a job."""
        return self._session.scalar(locked(select(Device).where(Device.id == device_id), skip=True))


class BindingRepository:
    """Which users are bound to which devices, in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def users(self, device_id: str) -> frozenset[str]:
        """Returns the users of a device."""
        return frozenset(self._session.scalars(_USERS, {"device_id": device_id}))

    def users_of(self, device_ids: Collection[str]) -> dict[str, list[str]]:
        """Returns the users of each device, sorted, by device id."""
        statement = select(DeviceUser.device_id, DeviceUser.user).where(DeviceUser.device_id.in_(device_ids))
        found: dict[str, list[str]] = {device_id: [] for device_id in device_ids}
        for device_id, user in self._session.execute(statement.order_by(DeviceUser.user)):
            found[device_id].append(user)
        return found

    def bound(self, device_id: str, user: str) -> bool:
        """Returns whether a user is bound to a device."""
        statement = select(DeviceUser.user).where(DeviceUser.device_id == device_id, DeviceUser.user == user)
        return self._session.scalar(statement) is not None

    def add(self, device_id: str, users: Iterable[str], now: datetime) -> None:
        """Binds users to a device; those that are bound already stay bound."""
        for user in users:
            add_if_absent(self._session, DeviceUser, device_id=device_id, user=user, bound_at=now)

    def remove(self, device_id: str, user: str) -> bool:
        """Unbinds a user from a device. Returns False if the user was not bound."""
        chosen = DeviceUser.device_id == device_id, DeviceUser.user == user
        statement = delete(DeviceUser).where(*chosen).returning(DeviceUser.user)
        return self._session.scalar(statement) is not None

    def newest_devices(self, tenant: str, user: str, limit: int) -> Sequence[Device]:
        """Returns devices of a user that were not revoked, those that enrolled last first."""
        statement = (
            select(Device)
            .join(DeviceUser, DeviceUser.device_id == Device.id)
            .where(DeviceUser.user == user, Device.tenant == tenant, Device.revoked_at.is_(None))
        )
        return self._session.scalars(statement.order_by(Device.number.desc()).limit(limit)).all()


class EnrollmentRepository:
    """One-time tokens in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, enrollment: EnrollmentToken) -> None:
        """Stores a new one-time token."""
        self._session.add(enrollment)
        self._session.flush()

    def take(self, digest: str, now: datetime) -> EnrollmentToken | None:
        """Uses a token up; None if there is none, it is used or it is over. Of two at once, one gets it."""
        statement = (
            update(EnrollmentToken)
            .where(
                EnrollmentToken.digest == digest, EnrollmentToken.used_at.is_(None), EnrollmentToken.expires_at > now
            )
            .values(used_at=now)
            .returning(EnrollmentToken)
        )
        return self._session.scalar(statement)


@dataclass(frozen=True)
class Spent:
    """A nonce that a device's request spends, and until when its signature is good."""

    device_id: str
    nonce: str
    until: datetime


class NonceRepository:
    """Spent nonces in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def spend_all(self, spent: Collection[Spent], now: datetime) -> set[tuple[str, str]]:
        """Stores nonces, and returns (device, nonce) of those that were not there. Of two at once, one gets it.

        A device's nonces that are over go when it spends the next, so that none lies longer than the device is away.
        """
        if not spent:
            return set()
        devices = {one.device_id for one in spent}
        over = delete(DeviceNonce).where(DeviceNonce.device_id.in_(devices), DeviceNonce.expires_at < now)
        self._session.execute(over.execution_options(synchronize_session=False))
        insert: Any = insert_sqlite if self._session.get_bind().dialect.name == "sqlite" else insert_postgresql
        rows = [{"device_id": one.device_id, "nonce": one.nonce, "expires_at": one.until} for one in spent]
        # Of the table, with its rows as parameters: a statement that SQLAlchemy has compiled before.
        stored = insert(DeviceNonce.__table__).on_conflict_do_nothing()
        found = self._session.execute(stored.returning(DeviceNonce.device_id, DeviceNonce.nonce), rows)
        return {(row.device_id, row.nonce) for row in found}


class DeviceRequestRepository:
    """Requests to join, in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, request: DeviceRequest) -> None:
        """Stores a new request."""
        self._session.add(request)
        self._session.flush()

    def waiting(self, address: str, now: datetime) -> int:
        """How many requests from an address are undecided and not over."""
        statement = select(func.count()).where(
            DeviceRequest.address == address,
            DeviceRequest.state == RequestState.PENDING,
            DeviceRequest.expires_at > now,
        )
        return self._session.scalar(statement) or 0

    def by_device_code(self, digest: str) -> DeviceRequest | None:
        """The request of a device code; locked, so that of two who ask at once one gets the token."""
        statement = select(DeviceRequest).where(DeviceRequest.device_code_digest == digest)
        return self._session.scalar(statement.with_for_update())

    def by_user_code(self, code: str, lock: bool) -> DeviceRequest | None:
        """The request of a user code, as it is stored. lock: for who decides; who only looks cannot lock."""
        statement = select(DeviceRequest).where(DeviceRequest.user_code == code)
        return self._session.scalar(statement.with_for_update() if lock else statement)

    def forget(self, before: datetime) -> None:
        """Removes requests that were over by then."""
        self._session.execute(delete(DeviceRequest).where(DeviceRequest.expires_at < before))
