"""The audit trail of adapters: lines that are added in the transaction of what they tell, and read. All its SQL."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredEvent
from server.auth.service import Principal
from server.clock import utc_now
from server.db.paging import PageRequest, PageRows, page_of
from shared.registry import AdapterAction, AdapterEvent


@dataclass(frozen=True)
class Actor:
    """Who does something: a token, a device, or the server itself."""

    id: str
    name: str = ""
    user: str | None = None

    @classmethod
    def of(cls, principal: Principal) -> Actor:
        """Who makes a request."""
        return cls(principal.token_id, principal.name, principal.user)


SERVER = Actor("server")


@dataclass(frozen=True)
class Line:
    """What is told besides who and when. main: before and after, where the action is about it."""

    action: AdapterAction
    version: int | None = None
    main: tuple[int | None, int | None] = (None, None)
    tag: str | None = None
    reason: str = ""


class AuditTrail:
    """The trail in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, adapter: Adapter, actor: Actor, line: Line) -> None:
        """Adds a line."""
        before, after = line.main
        row = StoredEvent(
            tenant=adapter.tenant,
            adapter=adapter.name,
            at=utc_now(),
            actor=actor.id,
            actor_name=actor.name,
            user=actor.user,
            action=line.action,
            version=line.version,
            main_before=before,
            main_after=after,
            tag=line.tag,
            reason=line.reason,
        )
        self._session.add(row)

    def page(self, tenant: str, name: str, request: PageRequest) -> PageRows[StoredEvent]:
        """Some lines about an adapter, newest first, also of one that is no more."""
        statement = select(StoredEvent).where(StoredEvent.tenant == tenant, StoredEvent.adapter == name)
        return page_of(self._session, statement, StoredEvent, request)

    def main_before(self, adapter: Adapter) -> int | None:
        """What `main` was before it became what it is, other than by a rollback; None if it was nothing else."""
        statement = (
            select(StoredEvent.main_before)
            .where(
                StoredEvent.tenant == adapter.tenant,
                StoredEvent.adapter == adapter.name,
                StoredEvent.main_after == adapter.main_version,
                StoredEvent.main_before != adapter.main_version,
                # So that two rollbacks go back by two, and not back and forth.
                StoredEvent.action != AdapterAction.ROLLED_BACK,
                # A removed adapter may have had the name before.
                StoredEvent.at >= adapter.created_at,
            )
            .order_by(StoredEvent.number.desc())
            .limit(1)
        )
        return self._session.scalar(statement)


def shown(row: StoredEvent) -> AdapterEvent:
    """A line as the API shows it."""
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
