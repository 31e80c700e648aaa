"""The audit trail of access: who let a device or a program in, and who shut it out. Entries are never changed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, text_enum, utc_now
from server.database.database import Repository
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.tokens import Principal
from server.ports import Port

ON_HOST = "server"  # the actor of commands on the server's host
# Takes an event of a tenant for its webhooks: its name, such as `device.revoked`, and data that can be sent as JSON.
PUBLISH: Port[Callable[[Session, str, str, dict[str, Any]], None]] = Port("webhooks.publish")


class AccessAction(StrEnum):
    """An action in the audit trail of access."""

    DEVICE_INVITED = "device-invited"  # by a one-time token
    DEVICE_ENROLLED = "device-enrolled"  # by itself, with its one-time token
    DEVICE_REVOKED = "device-revoked"
    # Of earlier releases, in which devices and programs asked with a code:
    DEVICE_APPROVED = "device-approved"
    DEVICE_DENIED = "device-denied"
    LOGIN_APPROVED = "login-approved"
    LOGIN_DENIED = "login-denied"


class AccessEvent(Numbered, Table):
    """One entry.

    subject: the name of the device or program. actor: the id of a token or of a device that enrolled, or `server`.
    """

    __tablename__ = "access_events"
    __table_args__ = (Index("ix_access_events_tenant", "tenant", "number"),)

    tenant: Mapped[str] = mapped_column(String(96))
    at: Mapped[datetime] = mapped_column(UtcTime)
    actor: Mapped[str] = mapped_column(String(64))
    actor_name: Mapped[str] = mapped_column(String(96))
    user: Mapped[str | None] = mapped_column(String(96))
    action: Mapped[AccessAction] = mapped_column(text_enum(AccessAction))
    subject: Mapped[str] = mapped_column(String(96))
    subject_id: Mapped[str | None] = mapped_column(String(64))  # of a device that is enrolled


class AccessTrail(Repository):
    """The audit trail of access in one session."""

    def record(
        self, tenant: str, person: Principal | None, action: AccessAction, subject: str, device_id: str | None = None
    ) -> None:
        """Adds an entry. person: whose token it was; None: a command on the server's host, or a device that enrolls.

        subject: the name of the device. device_id: of a device that is enrolled.
        """
        actor, name = (ON_HOST, "") if person is None else (person.token_id, person.name)
        if action is AccessAction.DEVICE_ENROLLED:
            actor, name = device_id or "", subject
        self._session.add(
            AccessEvent(
                tenant=tenant,
                at=utc_now(),
                actor=actor,
                actor_name=name,
                user=None if person is None else person.user,
                action=action,
                subject=subject,
                subject_id=device_id,
            )
        )
        event = action.replace("-", ".")
        PUBLISH.get()(self._session, tenant, event, {"id": device_id, "name": subject})

    def page(self, tenant: str, request: PageRequest) -> PageRows[AccessEvent]:
        """Returns a page of a tenant's entries, newest first."""
        return page_of(self._session, AccessEvent, request, AccessEvent.tenant == tenant)
