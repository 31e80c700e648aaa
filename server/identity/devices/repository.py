"""The tables and SQL of devices, of their users and spent nonces, and the cooldown of devices that fail."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import RootModel
from sqlalchemy import ForeignKey, Index, String, bindparam, case, delete, func, select, update
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, utc_now, view_of
from server.database.database import Repository, add_if_absent, insert_or, locked, read_columns
from server.database.paging import PageRequest, PageRows, page_of
from shared.capabilities import Capabilities, Labels
from shared.protocol import DeviceView
from shared.strict_model import StrictModel

FAILURES_BEFORE_COOLDOWN = 3  # in a row
FIRST_COOLDOWN, LONGEST_COOLDOWN = timedelta(minutes=1), timedelta(hours=1)


class LabelSet(RootModel[Labels]):
    """Labels that an operator gave to a device."""


class DeviceReport(StrictModel):
    """What a device reported about itself with its last request for a job."""

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
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    last_seen_at: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcTime)
    labels: Mapped[LabelSet] = mapped_column(Document(LabelSet), default=lambda: LabelSet({}), server_default="{}")
    report: Mapped[DeviceReport | None] = mapped_column(Document(DeviceReport))
    failures: Mapped[int] = mapped_column(default=0, server_default="0")  # unfinished jobs in a row
    cooldown_until: Mapped[datetime | None] = mapped_column(UtcTime)  # gets no new job before

    def view(self, users: Sequence[str]) -> DeviceView:
        """As the API shows it. users: those bound to it."""
        report = self.report or DeviceReport(datasets=())
        return view_of(
            DeviceView,
            self,
            labels=self.labels.root,
            users=list(users),
            datasets=list(report.datasets),
            memory_bytes=report.memory_bytes,
            capabilities=report.capabilities,
        )


class DeviceUser(Table):
    """A user whose data is on a device. A device trains jobs of its users only; its row guards these rows."""

    __tablename__ = "device_users"
    __table_args__ = (Index("ix_device_users_user", "user", "device_id"),)

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    user: Mapped[str] = mapped_column(String(96), primary_key=True)
    bound_at: Mapped[datetime] = mapped_column(UtcTime)


class DeviceNonce(Table):
    """A nonce that a device's signed request has spent, kept longer than its signature would be good."""

    __tablename__ = "device_nonces"

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    nonce: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(UtcTime)


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


def is_cooling_down(until: datetime | None) -> bool:
    """Whether a device gets no new job now."""
    return until is not None and until > utc_now()


# Built once, because every request for a job executes it.
_USERS = select(DeviceUser.user).where(DeviceUser.device_id == bindparam("device_id"))
_USERS_OF = select(DeviceUser.device_id, DeviceUser.user).where(
    DeviceUser.device_id.in_(bindparam("device_ids", expanding=True))
)

_PRESENT = (
    update(Device.__table__)  # type: ignore[arg-type]  # it is a table
    .where(Device.id == bindparam("device_id"))
    .values(
        last_seen_at=bindparam("seen_at"),
        report=func.coalesce(bindparam("new_report", type_=Document(DeviceReport)), Device.report),
    )
)


class DeviceRepository(Repository):
    """Devices in one session."""

    def get(self, tenant: str, device_id: str, *, lock: bool = False) -> Device | None:
        """A device of a tenant. lock: until the transaction ends."""
        return self._one(Device, Device.tenant == tenant, Device.id == device_id, lock=lock)

    def all(self, tenant: str) -> Sequence[Device]:
        """Every device of a tenant, oldest first."""
        return self._all(Device, Device.tenant == tenant)

    def live(self) -> Sequence[Device]:
        """Every device of every tenant that was not revoked."""
        return self._all(Device, Device.revoked_at.is_(None))

    def page(self, tenant: str, request: PageRequest) -> PageRows[Device]:
        """Some of a tenant's devices, newest first."""
        return page_of(self._session, Device, request, Device.tenant == tenant)

    def census(self, tenant: str, since: datetime) -> tuple[int, int]:
        """Returns how many devices of a tenant are not revoked, and how many of these were seen since a time."""
        live = Device.tenant == tenant, Device.revoked_at.is_(None)
        counts = select(func.count(), func.count(case((Device.last_seen_at >= since, 1)))).where(*live)
        enrolled, active = self._session.execute(counts).one()
        return enrolled, active

    def count_live(self, tenant: str) -> int:
        """Returns how many devices of a tenant are not revoked."""
        return self._count(Device.tenant == tenant, Device.revoked_at.is_(None))

    def record_presences(self, reports: Mapping[str, DeviceReport | None], now: datetime) -> None:
        """Records the time of each device's last request, and the report that came with it, if any.

        reports: by device. Their rows are locked in the order of ids.
        """
        rows = [{"device_id": name, "seen_at": now, "new_report": reports[name]} for name in sorted(reports)]
        self._session.connection().execute(_PRESENT, rows)

    def names(self, tenant: str, device_ids: Collection[str]) -> dict[str, str]:
        """Returns the names of devices of a tenant, by id."""
        statement = select(Device.id, Device.name).where(Device.tenant == tenant, Device.id.in_(device_ids))
        return {row.id: row.name for row in self._session.execute(statement)}

    def newest(self, tenant: str, limit: int) -> Sequence[Device]:
        """Returns the devices of a tenant that are not revoked, the newest first."""
        statement = select(Device).where(Device.tenant == tenant, Device.revoked_at.is_(None))
        return self._session.scalars(statement.order_by(Device.number.desc()).limit(limit)).all()

    def by_id(self, device_id: str) -> Device:
        """A device that is known to exist."""
        return self._session.scalars(select(Device).where(Device.id == device_id)).one()

    def forget_failures(self, device_id: str) -> None:
        """Ends the cooldown of a device after a finished job."""
        failed = update(Device).where(Device.id == device_id, Device.failures > 0)
        self._session.execute(failed.values(failures=0, cooldown_until=None))

    def unless_busy(self, device_id: str) -> Device | None:
        """Returns an existing device, locked; None if another transaction holds its lock, as during a job request."""
        return self._session.scalar(locked(select(Device).where(Device.id == device_id), skip=True))


class BindingRepository(Repository):
    """Which users are bound to which devices, in one session."""

    def users(self, device_id: str) -> frozenset[str]:
        """Returns the users of a device."""
        return frozenset(self._session.scalars(_USERS, {"device_id": device_id}))

    def users_of(self, device_ids: Collection[str]) -> dict[str, list[str]]:
        """Returns the users of each device, sorted, by device id."""
        users: dict[str, list[str]] = {device_id: [] for device_id in device_ids}
        for row in read_columns(self._session, _USERS_OF, {"device_ids": list(users)}):
            users[row.device_id].append(row.user)
        return {device_id: sorted(of_device) for device_id, of_device in users.items()}

    def bind(self, device_id: str, users: Iterable[str], now: datetime) -> None:
        """Binds users to a device; those that are bound already stay bound."""
        for user in users:
            add_if_absent(self._session, DeviceUser, device_id=device_id, user=user, bound_at=now)

    def remove(self, device_id: str, user: str) -> bool:
        """Unbinds a user from a device. Returns False if the user was not bound."""
        conditions = DeviceUser.device_id == device_id, DeviceUser.user == user
        statement = delete(DeviceUser).where(*conditions).returning(DeviceUser.user)
        return self._session.scalar(statement) is not None

    def newest_devices(self, tenant: str, user: str, limit: int) -> Sequence[Device]:
        """Returns devices of a user that were not revoked, those that enrolled last first."""
        statement = (
            select(Device)
            .join(DeviceUser, DeviceUser.device_id == Device.id)
            .where(DeviceUser.user == user, Device.tenant == tenant, Device.revoked_at.is_(None))
        )
        return self._session.scalars(statement.order_by(Device.number.desc()).limit(limit)).all()


@dataclass(frozen=True)
class SpentNonce:
    """A nonce that a device's request spends, and the time until which the nonce is kept."""

    device_id: str
    nonce: str
    until: datetime


class NonceRepository(Repository):
    """Spent nonces in one session."""

    def spend_all(self, nonces: Collection[SpentNonce]) -> set[tuple[str, str]]:
        """Stores nonces, and returns (device, nonce) of those that were not there. Of two at once, one gets it."""
        if not nonces:
            return set()
        rows = [{"device_id": one.device_id, "nonce": one.nonce, "expires_at": one.until} for one in nonces]
        # Of the table, with its rows as parameters: a statement that SQLAlchemy has compiled before.
        stored = insert_or(self._session, DeviceNonce.__table__).on_conflict_do_nothing()
        stored_rows = self._session.execute(stored.returning(DeviceNonce.device_id, DeviceNonce.nonce), rows)
        return {(row.device_id, row.nonce) for row in stored_rows}

    def purge(self, now: datetime) -> None:
        """Removes the nonces whose time is over."""
        self._session.execute(delete(DeviceNonce).where(DeviceNonce.expires_at < now))
