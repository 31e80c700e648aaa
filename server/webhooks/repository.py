"""The tables of webhooks and their deliveries with all their SQL, and the outbox.

`publish` stores a delivery in the transaction of its event, so an event that is rolled back is never sent, and a
committed one is sent at least once. It locks no row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import JSON, ForeignKey, Index, String, Text, delete, exists, insert, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, new_id, text_enum, utc_now
from server.database.database import Repository
from server.database.paging import PageRequest, PageRows, page_of
from server.jobs.repository import Job
from server.jobs.service import JobSubscriber
from shared.webhooks import DeliveryState, WebhookEvent

MAX_WAITING = 1000  # deliveries of one webhook; further events are not stored until some were sent
MAX_ENDED = 1000  # the latest deliveries of one webhook that are kept in its log
MAX_DUE = 200  # webhooks whose tasks one sweep requests
_NAMES = frozenset(WebhookEvent)
_WAITING = text("state = 'waiting'")
_log = structlog.get_logger()


class Webhook(Numbered, Table):
    """A URL that is notified of events of its tenant."""

    __tablename__ = "webhooks"
    __table_args__ = (Index("ix_webhooks_tenant", "tenant", "number"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]] = mapped_column(JSON)
    sealed: Mapped[bytes] = mapped_column()  # the secret, encrypted
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    due_at: Mapped[datetime | None] = mapped_column(UtcTime)  # of its next task; NULL while one waits or runs
    failures: Mapped[int] = mapped_column(default=0)  # attempts that failed since the last successful one
    failing_since: Mapped[datetime | None] = mapped_column(UtcTime)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcTime)


class WebhookDelivery(Numbered, Table):
    """One message of a webhook. status, error: of the latest attempt."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_webhook", "webhook_number", "number"),
        Index(
            "ix_webhook_deliveries_due", "webhook_number", "due_at", sqlite_where=_WAITING, postgresql_where=_WAITING
        ),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    webhook_number: Mapped[int] = mapped_column(ForeignKey("webhooks.number", ondelete="CASCADE"))
    event: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[DeliveryState] = mapped_column(text_enum(DeliveryState))
    attempts: Mapped[int] = mapped_column(default=0)
    status: Mapped[int | None] = mapped_column()
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    due_at: Mapped[datetime] = mapped_column(UtcTime)
    attempted_at: Mapped[datetime | None] = mapped_column(UtcTime)


class WebhookRepository(Repository):
    """Webhooks and deliveries in one session."""

    def get(self, tenant: str, webhook_id: str) -> Webhook | None:
        """Returns a webhook of a tenant."""
        return self._one(Webhook, Webhook.tenant == tenant, Webhook.id == webhook_id)

    def get_locked(self, webhook_id: str) -> Webhook | None:
        """Returns a webhook, locked until the transaction ends."""
        return self._one(Webhook, Webhook.id == webhook_id, lock=True)

    def all(self) -> Sequence[Webhook]:
        """Returns the webhooks of all tenants, locked."""
        return self._all(Webhook, lock=True)

    def count(self, tenant: str) -> int:
        """Returns how many webhooks a tenant has."""
        return self._count(Webhook.tenant == tenant)

    def page(self, tenant: str, request: PageRequest) -> PageRows[Webhook]:
        """Returns a page of a tenant's webhooks, newest first."""
        return page_of(self._session, Webhook, request, Webhook.tenant == tenant)

    def delete(self, webhook: Webhook) -> None:
        """Removes a webhook; the database removes its deliveries."""
        self._session.execute(delete(Webhook).where(Webhook.number == webhook.number))

    def add_delivery(self, webhook: Webhook, event: str, data: dict[str, Any]) -> WebhookDelivery | None:
        """Stores a message to send. Returns None if as many as possible wait already."""
        waiting = WebhookDelivery.webhook_number == webhook.number, WebhookDelivery.state == DeliveryState.WAITING
        if self._count(*waiting) >= MAX_WAITING:
            _log.warning("webhook-full", tenant=webhook.tenant, webhook=webhook.id, event_name=event)
            return None
        now = utc_now()
        # Inserted at once: the next count must see it, although the caller's own rows are not flushed yet.
        added = insert(WebhookDelivery).values(
            id=new_id("message"),
            webhook_number=webhook.number,
            event=event,
            body=json.dumps({"type": event, "timestamp": now.isoformat(), "data": data}),
            state=DeliveryState.WAITING,
            attempts=0,
            created_at=now,
            due_at=now,
        )
        return self._session.scalar(added.returning(WebhookDelivery))

    def deliveries(self, webhook: Webhook, request: PageRequest) -> PageRows[WebhookDelivery]:
        """Returns a page of a webhook's deliveries, newest first."""
        return page_of(self._session, WebhookDelivery, request, WebhookDelivery.webhook_number == webhook.number)

    def due(self, now: datetime) -> Sequence[str]:
        """Returns the ids of the webhooks that have a message to send now."""
        has_message = exists().where(WebhookDelivery.webhook_number == Webhook.number, _WAITING)
        has_message = has_message.where(WebhookDelivery.due_at <= now)
        due = select(Webhook.id).where(Webhook.due_at <= now, has_message).order_by(Webhook.due_at)
        return self._session.scalars(due.limit(MAX_DUE)).all()

    def due_deliveries(self, webhook: Webhook, now: datetime, limit: int) -> Sequence[WebhookDelivery]:
        """Returns the oldest messages of a webhook that are to be sent now."""
        due = WebhookDelivery.webhook_number == webhook.number, _WAITING, WebhookDelivery.due_at <= now
        return self._all(WebhookDelivery, *due, limit=limit)

    def delivery(self, delivery_id: str) -> WebhookDelivery | None:
        """Returns a delivery; None if it was removed."""
        return self._one(WebhookDelivery, WebhookDelivery.id == delivery_id)

    def fail_waiting(self, webhook: Webhook, error: str) -> None:
        """Ends all deliveries of a webhook that wait."""
        waiting = update(WebhookDelivery).where(WebhookDelivery.webhook_number == webhook.number, _WAITING)
        failed = waiting.values(state=DeliveryState.FAILED, error=error)
        self._session.execute(failed, execution_options={"synchronize_session": False})

    def trim(self, webhook: Webhook) -> None:
        """Removes the oldest ended deliveries of a webhook beyond MAX_ENDED."""
        ended = WebhookDelivery.webhook_number == webhook.number, WebhookDelivery.state != DeliveryState.WAITING
        newest_removed = (
            select(WebhookDelivery.number).where(*ended).order_by(WebhookDelivery.number.desc()).offset(MAX_ENDED)
        ).limit(1)
        removed = delete(WebhookDelivery).where(*ended, WebhookDelivery.number <= newest_removed.scalar_subquery())
        self._session.execute(removed, execution_options={"synchronize_session": False})


def publish(session: Session, tenant: str, event: str, data: dict[str, Any]) -> None:
    """Stores a message of an event for each webhook of the tenant that subscribes to it. Other names are ignored."""
    if event not in _NAMES:
        return
    with session.no_autoflush:  # the caller's rows may be incomplete
        enabled = session.scalars(select(Webhook).where(Webhook.tenant == tenant, Webhook.disabled_at.is_(None)))
        for webhook in enabled.all():
            if event in webhook.events:
                WebhookRepository(session).add_delivery(webhook, event, data)


class JobPublisher(JobSubscriber):
    """Publishes the ends of jobs, in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def ended(self, job: Job) -> None:
        """Publishes `job.succeeded`, `job.failed` or `job.cancelled`."""
        data = {
            "id": job.id,
            "user": job.user,
            "adapter": job.adapter,
            "adapter_version": job.adapter_version,
            "cohort": None if job.round is None else job.round.cohort,
            "error": None if job.error is None else job.error.model_dump(mode="json"),
        }
        publish(self._session, job.tenant, f"job.{job.state}", data)
