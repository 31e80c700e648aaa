"""Sends messages that wait: a sweep requests the task of each webhook that has some, and the handler runs it.

The task of a webhook sends a few messages, oldest first, and ends at the first failed attempt; the tenants take turns
between tasks. A failed message has its own schedule (`RETRY_SECONDS`), and its webhook pauses, so a receiver that never
answers takes little of the workers' time. A worker that is killed has its messages sent again by another one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

import structlog
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.identity.signing_keys.service import KeyService
from server.settings import Settings
from server.tasks.handlers import Handler, TaskRun
from server.tasks.requests import request_task
from server.webhooks.repository import Webhook, WebhookDelivery, WebhookRepository
from server.webhooks.sending import Attempt, send
from server.webhooks.service import unseal
from shared.errors import MobizoError
from shared.webhooks import TEST_EVENT, DeliveryState

WEBHOOK = "webhook"  # the kind of task
BATCH, BATCH_SECONDS = 20, 10.0  # messages of one task, and the time after which it begins no further one
RETRY_SECONDS = (5, 60, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000)  # after each failed attempt: 52 h in all
FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=5), timedelta(minutes=5)  # of a webhook, doubled with each failure in a row
DISABLED_AFTER = timedelta(days=5)  # of failed attempts alone
_log = structlog.get_logger()


@dataclass(frozen=True)
class Messages:
    """The messages of one task, as (id, body)."""

    webhook_id: str
    url: str
    secret: str
    bodies: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class WebhookHandler(Handler):
    """Sends the messages of one webhook."""

    settings: Settings

    kind: ClassVar[str] = WEBHOOK
    subject_name: ClassVar[str] = "webhook"

    def begin(self, session: Session, subject: str) -> Messages | None:
        """Returns the messages to send now; None if there are none."""
        key = KeyService(session, self.settings).private()
        webhooks = WebhookRepository(session)
        webhook = webhooks.get_locked(subject)
        if webhook is None:
            return None
        due = webhooks.due_deliveries(webhook, utc_now(), BATCH)
        if not due:
            webhook.due_at = utc_now()
            return None
        bodies = tuple((delivery.id, delivery.body.encode()) for delivery in due)
        return Messages(webhook.id, webhook.url, unseal(key, webhook), bodies)

    def heartbeat(self, session: Session, order: Messages) -> bool:
        """Returns whether the webhook still exists."""
        return WebhookRepository(session).get_locked(order.webhook_id) is not None

    def run(self, order: Messages, run: TaskRun) -> list[tuple[str, Attempt]]:
        """Sends messages until one fails or the time is over; returns the attempts by the id of their message."""
        attempts: list[tuple[str, Attempt]] = []
        end = time.monotonic() + BATCH_SECONDS
        for message_id, body in order.bodies:
            if not run.should_continue() or time.monotonic() > end:
                break
            attempt = send(order.url, self.settings.webhook_networks, order.secret, message_id, body)
            attempts.append((message_id, attempt))
            if attempt.error is not None:
                break
        return attempts

    def publish(self, session: Session, order: Messages, result: list[tuple[str, Attempt]]) -> bool:
        """Records the attempts, and when the webhook is due again; disables one that has failed for too long."""
        webhooks, now = WebhookRepository(session), utc_now()
        webhook = webhooks.get_locked(order.webhook_id)
        if webhook is None:
            return True
        for message_id, attempt in result:
            delivery = webhooks.delivery(message_id)
            if delivery is not None:
                _record(webhook, delivery, attempt, now)
        pause = min(FIRST_PAUSE * 2 ** min(webhook.failures - 1, 10), MAX_PAUSE) if webhook.failures else timedelta(0)
        webhook.due_at = now + pause
        is_lost = webhook.failing_since is not None and now - webhook.failing_since > DISABLED_AFTER
        if is_lost and webhook.disabled_at is None:
            webhook.disabled_at = now
            webhooks.fail_waiting(webhook, f"the webhook was disabled: it failed for {DISABLED_AFTER.days} days")
            _log.warning("webhook-disabled", tenant=webhook.tenant, webhook=webhook.id)
        webhooks.trim(webhook)
        return True

    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Lets the webhook pause, for example after its secret could not be decrypted."""
        webhook = WebhookRepository(session).get_locked(subject)
        if webhook is not None:
            webhook.due_at, webhook.failing_since = utc_now() + MAX_PAUSE, webhook.failing_since or utc_now()


def _record(webhook: Webhook, delivery: WebhookDelivery, attempt: Attempt, now: datetime) -> None:
    """Stores an attempt in its delivery and in the webhook. A test is sent once."""
    delivery.attempts += 1
    delivery.status, delivery.error, delivery.attempted_at = attempt.status, attempt.error, now
    if attempt.error is None:
        delivery.state = DeliveryState.DELIVERED
        webhook.failures, webhook.failing_since, webhook.disabled_at = 0, None, None
        return
    webhook.failures += 1
    webhook.failing_since = webhook.failing_since or now
    if delivery.event == TEST_EVENT or delivery.attempts > len(RETRY_SECONDS):
        delivery.state = DeliveryState.FAILED
    else:
        delivery.due_at = now + timedelta(seconds=RETRY_SECONDS[delivery.attempts - 1])


def request_deliveries(database: Database) -> None:
    """Requests the task of each webhook that has a message to send. For a sweep of any worker."""
    with database.reading() as session:
        due = WebhookRepository(session).due(utc_now())
    for webhook_id in due:
        with database.writing() as session:
            webhook = WebhookRepository(session).get_locked(webhook_id)
            if webhook is not None and webhook.due_at is not None:
                webhook.due_at = None
                request_task(session, WEBHOOK, webhook.id, webhook.tenant)
