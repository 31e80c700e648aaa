"""Devices: inviting, enrolling, labelling and revoking them, their one-time tokens, and whose jobs they train.

Submitters name users freely, and enrolled devices name their data sets freely. A binding connects a user to a device,
and a device gets jobs of its users only. Only an operator makes one: when it creates the enrollment token, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

from pydantic import RootModel, ValidationError
from sqlalchemy import ForeignKey, String, func, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, new_id, utc_now
from server.identity.audit import AccessAction, AccessTrail
from server.identity.devices.repository import BindingRepository, Device, DeviceRepository, LabelSet
from server.identity.quotas import Quota, QuotaService
from server.identity.tenants import TenantService
from server.identity.tokens import Principal, TokenService, new_token, token_digest
from server.ports import Port
from shared.access import Role
from shared.errors import BadRequest, Conflict, DeviceNotBound, NotFound, Unauthorized, Untrusted
from shared.invalid_fields import first_invalid
from shared.protocol import MAX_USERS, DeviceEnrollment, Enrollment
from shared.signing import parse_public

# Takes back what a device has of a user who was unbound from it, given the device's id and the user.
UNBOUND: Port[Callable[[Session, str, str], None]] = Port("devices.unbound")
# Takes back what a device has that was revoked, given its id.
REVOKED: Port[Callable[[Session, str], None]] = Port("devices.revoked")


class BindingService:
    """Bindings in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bindings = BindingRepository(session)

    def bind(self, device: Device, users: Iterable[str]) -> None:
        """Binds users to a device, which is locked or new. Idempotent. Raises Conflict for too many users."""
        new = frozenset(users) - self._bindings.users(device.id)
        if len(self._bindings.users(device.id)) + len(new) > MAX_USERS:
            raise Conflict(f"device {device.name} would have more than {MAX_USERS} users; unbind others first")
        self._bindings.bind(device.id, sorted(new), utc_now())

    def unbind(self, device: Device, user: str) -> None:
        """Unbinds a user from a device, which is locked, and takes back the user's jobs. Idempotent."""
        if self._bindings.remove(device.id, user):
            UNBOUND.get()(self._session, device.id, user)

    def check(self, tenant: str, device_id: str, *users: str) -> None:
        """Raises NotFound unless a device is enrolled, DeviceNotBound unless it trains for each of these users."""
        device = DeviceRepository(self._session).get(tenant, device_id)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"device: no device {device_id!r} is enrolled here")
        bound_users = self._bindings.users(device_id)
        for user in users:
            if user not in bound_users:
                raise DeviceNotBound(
                    f"device {device_id} is not bound to user {user!r}; if the user's data is on it, an operator runs "
                    f"`mobizo device bind {device_id} {user}`"
                )


class UserNames(RootModel[tuple[str, ...]]):
    """Users whose data is on a device that is about to enroll."""


class EnrollmentToken(Numbered, Table):
    """A one-time token, by its digest."""

    __tablename__ = "enrollments"

    digest: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime] = mapped_column(UtcTime)
    used_at: Mapped[datetime | None] = mapped_column(UtcTime)
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    users: Mapped[UserNames] = mapped_column(
        Document(UserNames), default=lambda: UserNames(()), server_default="[]"
    )  # bound to the device when it is enrolled


class DeviceService:
    """Devices in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._devices = DeviceRepository(session)
        self._tokens = TokenService(session)
        self._tenants = TenantService(session)
        self._bindings = BindingService(session)

    def invite(
        self, tenant: str, seconds: int, users: Iterable[str] = (), person: Principal | None = None
    ) -> Enrollment:
        """A one-time token that lasts `seconds`. users: those that the enrolled device trains for.

        person: who makes it; None: a command on the server's host. Raises NotFound for an unknown tenant, or
        QuotaExceeded.
        """
        self._tenants.get(tenant)
        now = utc_now()
        text = new_token("enroll")
        expires = now + timedelta(seconds=seconds)
        self._session.add(
            EnrollmentToken(
                digest=token_digest(text),
                tenant=tenant,
                created_at=now,
                expires_at=expires,
                users=UserNames(tuple(sorted(set(users)))),
            )
        )
        check_tokens(self._session, tenant)
        subject = ", ".join(sorted(set(users)))[:96] or "no user"
        AccessTrail(self._session).record(tenant, person, AccessAction.DEVICE_INVITED, subject)
        return Enrollment(token=text, expires_at=expires)

    def get(self, tenant: str, device_id: str, lock: bool = False) -> Device:
        """A device of the tenant; lock: until the transaction ends. Raises NotFound."""
        device = self._devices.get(tenant, device_id, lock=lock)
        if device is None:
            raise NotFound(f"there is no device {device_id!r}")
        return device

    def label(self, device: Device, changes: Mapping[str, str | None]) -> None:
        """Sets a device's labels, and removes those that are to be None. Raises BadRequest for too many."""
        labels = device.labels.root | {name: value for name, value in changes.items() if value is not None}
        removed_names = {name for name, value in changes.items() if value is None}
        try:
            device.labels = LabelSet(
                {name: value for name, value in sorted(labels.items()) if name not in removed_names}
            )
        except ValidationError as error:
            raise BadRequest(f"labels: {first_invalid(error).message}") from error

    def enroll(self, one_time_token: str, request: DeviceEnrollment) -> tuple[Device, str]:
        """A new device and its token, for a one-time token that is used up by this.

        Raises BadRequest for an invalid public key, Unauthorized for a token that is unknown, used or over,
        QuotaExceeded.
        """
        try:
            parse_public(request.public_key)
        except Untrusted as error:
            raise BadRequest("public_key must be base64 of an Ed25519 key's 32 bytes") from error
        now = utc_now()
        enrollment = self._take(token_digest(one_time_token), now)
        if enrollment is None:
            raise Unauthorized("the one-time token is not known, was used, or is over; ask the operator for another")
        tenant = enrollment.tenant
        device = Device(
            id=new_id("device"),
            tenant=tenant,
            name=request.name,
            public_key=request.public_key,
            platform=request.platform,
            created_at=now,
            last_seen_at=now,
        )
        self._devices.add(device)
        self._bindings.bind(device, enrollment.users.root)
        QuotaService(self._session).check(tenant, Quota.DEVICES, lambda: self._devices.count_live(tenant))
        enrollment.device_id = device.id
        AccessTrail(self._session).record(tenant, None, AccessAction.DEVICE_ENROLLED, device.name, device.id)
        _, text = self._tokens.issue(Role.DEVICE, tenant, device.name, device.id)
        return device, text

    def _take(self, digest: str, now: datetime) -> EnrollmentToken | None:
        """Uses a one-time token up; None if there is none, it is used or it is over. Of two at once, one gets it."""
        live = EnrollmentToken.used_at.is_(None), EnrollmentToken.expires_at > now
        statement = update(EnrollmentToken).where(EnrollmentToken.digest == digest, *live).values(used_at=now)
        return self._session.scalar(statement.returning(EnrollmentToken))


def check_tokens(session: Session, tenant: str) -> None:
    """Raises QuotaExceeded if a tenant has too many valid tokens and unused one-time tokens."""
    QuotaService(session).check(tenant, Quota.TOKENS, lambda: count_tokens(session, tenant))


def count_tokens(session: Session, tenant: str) -> int:
    """Returns how many valid tokens of users and services, and unused one-time tokens, a tenant has."""
    now = utc_now()
    unused = EnrollmentToken.used_at.is_(None), EnrollmentToken.expires_at > now
    statement = select(func.count()).select_from(EnrollmentToken).where(EnrollmentToken.tenant == tenant, *unused)
    return TokenService(session).count_live(tenant, now) + (session.scalar(statement) or 0)


def revoke_device(session: Session, tenant: str, device_id: str, person: Principal | None = None) -> Device:
    """Revokes a device and its tokens, returns its jobs to the queue, and records that. Repeating it changes nothing.

    It can only return by enrolling as another device. person: who revokes it; None: a command on the server's host.
    Raises NotFound.
    """
    device = DeviceService(session).get(tenant, device_id, lock=True)
    if device.revoked_at is None:
        device.revoked_at = utc_now()
        TokenService(session).revoke_device(device.id)
        REVOKED.get()(session, device.id)
        AccessTrail(session).record(tenant, person, AccessAction.DEVICE_REVOKED, device.name, device.id)
    return device
