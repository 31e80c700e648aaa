"""What a tenant has of everything that has a quota, for the command line and the dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.federation.repository import CohortRepository
from server.identity.devices.repository import DeviceRepository
from server.identity.devices.service import count_tokens
from server.identity.quotas import DEFAULTS, Quota, QuotaService
from server.jobs.repository import JobRepository
from server.jobs.service import DAY
from server.registry.ratings import RatingService
from server.webhooks.repository import WebhookRepository


@dataclass(frozen=True)
class QuotaUsage:
    """One quota of a tenant, and how much of it is used."""

    quota: Quota
    used: int
    limit: int
    default: int


def tenant_usage(session: Session, tenant: str) -> list[QuotaUsage]:
    """Returns the usage of every quota of a tenant."""
    quotas, jobs = QuotaService(session), JobRepository(session)
    used = {
        Quota.WAITING_JOBS: jobs.count_waiting(tenant),
        Quota.JOBS_PER_DAY: jobs.count_submitted(tenant, utc_now() - DAY),
        Quota.STORED_BYTES: quotas.stored_bytes(tenant),
        Quota.TOKENS: count_tokens(session, tenant),
        Quota.DEVICES: DeviceRepository(session).count_live(tenant),
        Quota.COHORTS: CohortRepository(session).count(tenant),
        Quota.SERIES: jobs.count_series(tenant),
        Quota.JOB_EVENTS: jobs.most_events(tenant),
        Quota.WEBHOOKS: WebhookRepository(session).count(tenant),
        Quota.RATINGS: RatingService(session).count(tenant),
    }
    limits = quotas.limits(tenant)
    return [QuotaUsage(quota, used[quota], limits[quota], DEFAULTS[quota]) for quota in Quota]
