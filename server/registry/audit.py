"""The audit trail of adapters and all its SQL. An entry is added in the transaction of the action that it records."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.tokens import Principal
from server.registry.models import Adapter, StoredEvent
from shared.registry import AdapterAction, AdapterEvent


@dataclass(frozen=True)
class Actor:
    """The author of an action: a token, a device, or the server itself."""

    id: str
    name: str = ""
    user: str | None = None

    @classmethod
    def of(cls, principal: Principal) -> Actor:
        """Returns the actor of a request."""
        return cls(principal.token_id, principal.name, principal.user)


SERVER = Actor("server")


@dataclass(frozen=True)
class AuditEntry:
    """An entry without its author and time. main: the version numbers before and after, if the action moved `main`."""

    action: AdapterAction
    version: int | None = None
    main: tuple[int | None, int | None] = (None, None)
    tag: str | None = None
    reason: str = ""


class AuditTrail:
    """The audit trail in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, adapter: Adapter, actor: Actor, entry: AuditEntry) -> None:
        """Adds an entry."""
        before, after = entry.main
        row = StoredEvent(
            tenant=adapter.tenant,
            adapter=adapter.name,
            at=utc_now(),
            actor=actor.id,
            actor_name=actor.name,
            user=actor.user,
            action=entry.action,
            version=entry.version,
            main_before=before,
            main_after=after,
            tag=entry.tag,
            reason=entry.reason,
        )
        self._session.add(row)

    def page(self, tenant: str, name: str, request: PageRequest) -> PageRows[StoredEvent]:
        """Returns a page of the entries about an adapter, newest first. The adapter may have been removed."""
        statement = select(StoredEvent).where(StoredEvent.tenant == tenant, StoredEvent.adapter == name)
        return page_of(self._session, statement, StoredEvent, request)

    def main_before(self, adapter: Adapter) -> int | None:
        """Returns the version that was `main` before the current one, ignoring rollbacks; None if there was none."""
        statement = (
            select(StoredEvent.main_before)
            .where(
                StoredEvent.tenant == adapter.tenant,
                StoredEvent.adapter == adapter.name,
                StoredEvent.main_after == adapter.main_version,
                StoredEvent.main_before != adapter.main_version,
                # Two rollbacks in a row thus go back two versions instead of back and forth.
                StoredEvent.action != AdapterAction.ROLLED_BACK,
                # An earlier adapter that was removed may have had the same name.
                StoredEvent.at >= adapter.created_at,
            )
            .order_by(StoredEvent.number.desc())
            .limit(1)
        )
        return self._session.scalar(statement)


def shown(row: StoredEvent) -> AdapterEvent:
    """Returns an entry as the API shows it."""
    return AdapterEvent(
        at=row.at,
        actor=row.actor,
        name=row.actor_name,
        user=row.user,
        action=row.action,
        version=row.version,
        main_before=row.main_before,
        main_after=row.main_after,
        tag=row.tag,
        reason=row.reason,
    )
