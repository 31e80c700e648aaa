"""What one tenant may have: the quotas, their defaults, and the checks of those that add something.

A check comes after the addition, in the same transaction: it waits for the other transactions that add to the same
quota, and then counts what all of them have committed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pydantic import Field, RootModel
from sqlalchemy import select, update

from server.database.database import Repository, lock_name
from server.identity.tenants import Tenant, TenantService
from shared.errors import QuotaExceeded

GIBIBYTE = 1 << 30


class Quota(StrEnum):
    """Something of which a tenant may have a limited number."""

    WAITING_JOBS = "waiting_jobs"  # for their program or for a device
    JOBS_PER_DAY = "jobs_per_day"  # submitted in the last 24 hours, whatever became of them
    STORED_BYTES = "stored_bytes"  # of the LoRA-B files and the trajectories of adapter versions
    TOKENS = "tokens"  # of users and services that are valid, and one-time tokens that are not used
    DEVICES = "devices"  # that are not revoked
    COHORTS = "cohorts"
    SERIES = "series"  # of jobs that repeat and have not ended
    JOB_EVENTS = "job_events"  # of one new job; later progress is shown and adds no event
    WEBHOOKS = "webhooks"
    RATINGS = "ratings"  # of texts on the dashboard's page "Try it", which asks for none without a quota


DEFAULTS: dict[Quota, int] = {
    Quota.WAITING_JOBS: 10_000,
    Quota.JOBS_PER_DAY: 100_000,
    Quota.STORED_BYTES: 100 * GIBIBYTE,
    Quota.TOKENS: 1_000,
    Quota.DEVICES: 20_000,
    Quota.COHORTS: 1_000,
    Quota.SERIES: 10_000,
    Quota.JOB_EVENTS: 10_000,
    Quota.WEBHOOKS: 20,
    Quota.RATINGS: 0,
}


class QuotaChanges(RootModel[dict[Quota, int]]):
    """The quotas of a tenant that differ from the defaults."""

    root: dict[Quota, int] = Field(default_factory=dict)


class QuotaService(Repository):
    """Quotas in one transaction."""

    def limits(self, tenant: str) -> dict[Quota, int]:
        """Returns every quota of a tenant."""
        return _limits(self._session.scalar(select(Tenant.quotas).where(Tenant.name == tenant)) or "{}")

    def set_limit(self, tenant: str, quota: Quota, limit: int | None) -> None:
        """Changes a tenant's quota; None: to the default. Raises NotFound for an unknown tenant."""
        row = TenantService(self._session).get(tenant)
        changes = QuotaChanges.model_validate_json(row.quotas).root
        changes.pop(quota, None)
        row.quotas = QuotaChanges(changes if limit is None else changes | {quota: limit}).model_dump_json()

    def check(self, tenant: str, quota: Quota, used: Callable[[], int]) -> None:
        """Raises QuotaExceeded if a tenant has more than its quota. used: counts, the caller's additions included."""
        lock_name(self._session, "quota", quota, tenant)
        _check(self.limits(tenant)[quota], quota, used())

    def store(self, tenant: str, size: int) -> None:
        """Adds to a tenant's stored bytes; a negative size removes. The tenant's row stays locked."""
        counted = update(Tenant).where(Tenant.name == tenant).values(stored_bytes=Tenant.stored_bytes + size)
        self._session.execute(counted, execution_options={"synchronize_session": False})

    def stored_bytes(self, tenant: str) -> int:
        """Returns the bytes that a tenant has stored."""
        return self._session.scalar(select(Tenant.stored_bytes).where(Tenant.name == tenant)) or 0

    def check_stored(self, tenant: str, more: int = 0) -> None:
        """Raises QuotaExceeded if a tenant has no room for `more` bytes."""
        of_tenant = select(Tenant.quotas, Tenant.stored_bytes).where(Tenant.name == tenant)
        quotas, stored_bytes = self._session.execute(of_tenant).one()
        _check(_limits(quotas)[Quota.STORED_BYTES], Quota.STORED_BYTES, stored_bytes + more)


def _limits(quotas: str) -> dict[Quota, int]:
    """Returns every quota. quotas: the column of the tenant."""
    return DEFAULTS | QuotaChanges.model_validate_json(quotas).root


def _check(limit: int, quota: Quota, used: int) -> None:
    if used > limit:
        raise QuotaExceeded(
            f"the tenant's quota of {quota} is {limit}, and this would be more; remove some or wait, or ask the "
            f"server's administrator for more (`mobizo-server tenant quota`)",
            quota=quota,
            limit=limit,
        )
