"""JSON models of webhooks and their deliveries, and the events that they are about."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from shared.access import Scope
from shared.strict_model import StrictModel

TEST_EVENT = "webhook.test"  # sent on request only


class WebhookEvent(StrEnum):
    """Something of which a webhook can be notified. The first word is a key of `EVENT_SCOPES`."""

    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    VERSION_PUBLISHED = "version.published"  # and approved by the adapter's rule
    VERSION_HELD = "version.held"
    VERSION_APPROVED = "version.approved"
    VERSION_PROMOTED = "version.promoted"
    VERSION_DELETED = "version.deleted"
    DEVICE_ENROLLED = "device.enrolled"
    DEVICE_REVOKED = "device.revoked"
    COHORT_JOINED = "cohort.joined"
    COHORT_LEFT = "cohort.left"
    COHORT_ROUND_OPENED = "cohort.round_opened"
    COHORT_ROUND_CLOSED = "cohort.round_closed"
    COHORT_ROUND_ABANDONED = "cohort.round_abandoned"


# The scope that a token needs to subscribe to events, by their first word: that of the routes with the same data.
EVENT_SCOPES = {
    "job": Scope.JOBS_READ,
    "version": Scope.ADAPTERS_READ,
    "device": Scope.DEVICES_READ,
    "cohort": Scope.COHORTS_READ,
}


class DeliveryState(StrEnum):
    """The state of a delivery."""

    WAITING = "waiting"  # for its first or its next attempt
    DELIVERED = "delivered"
    FAILED = "failed"


class WebhookRequest(StrictModel):
    """A URL to notify of events."""

    url: str = Field(max_length=2000, pattern=r"^https?://[!-~]{1,1990}$", description="receives a POST of each event")
    events: list[WebhookEvent] = Field(min_length=1, max_length=len(WebhookEvent))


class WebhookView(StrictModel):
    """A webhook without its secret."""

    id: str
    url: str
    events: list[str]
    created_at: datetime
    failing_since: datetime | None = Field(description="the first failed attempt since the last successful one")
    disabled_at: datetime | None = Field(description="when it was disabled; a successful test enables it again")


class WebhookGrant(StrictModel):
    """A new webhook. Its secret is shown only in this response."""

    secret: str = Field(description="verifies signatures; in the form of Standard Webhooks")
    view: WebhookView


class DeliveryView(StrictModel):
    """One message of a webhook and its attempts."""

    id: str = Field(description="the header `webhook-id`, the same in each attempt")
    event: str
    state: DeliveryState
    attempts: int
    status: int | None = Field(description="HTTP status of the latest attempt")
    error: str | None = Field(description="why the latest attempt failed")
    created_at: datetime
    attempted_at: datetime | None
    due_at: datetime = Field(description="while it waits: when the next attempt is due")
