"""Subscribes federation to job events: protects the adapters of cohorts and accounts for privacy budgets."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.database import Database
from server.federation.privacy.service import PrivacyService, resolve_privacy
from server.federation.repository import CohortRepository
from server.jobs.lifecycle import JobSubscriber
from server.jobs.models import Job
from shared.errors import Conflict
from shared.federation.accounting import epsilon_of
from shared.job import JobRequest


def prepare_privacy(database: Database, tenant: str, request: JobRequest) -> None:
    """Accounts for a private job before its transaction begins, which then finds the results in the cache.

    Raises as `resolve_privacy`.
    """
    resolved = resolve_privacy(request)
    with database.reading() as session:
        checks = PrivacyService(session).budget_checks(tenant, resolved)
    for spendings, delta in checks:
        epsilon_of(spendings, delta)


class FederationSubscriber(JobSubscriber):
    """Checks cohorts and privacy budgets in one transaction."""

    def __init__(self, session: Session) -> None:
        self._cohorts = CohortRepository(session)
        self._privacy = PrivacyService(session)

    def settle(self, request: JobRequest) -> JobRequest:
        """Returns the request with its noise multiplier computed. Raises the errors of `resolve_privacy`."""
        return resolve_privacy(request)

    def check_adapter(self, tenant: str, request: JobRequest) -> None:
        """Raises Conflict if the adapter belongs to a cohort: only rounds of the cohort train it."""
        if self._cohorts.get(tenant, request.adapter) is not None:
            raise Conflict(
                f"adapter {request.adapter!r} belongs to a cohort; choose another name, and set the job's start to "
                "this adapter to continue training from it"
            )

    def admit(self, tenant: str, request: JobRequest) -> None:
        """Raises BudgetExceeded if the job would spend more than its user's budget has left."""
        self._privacy.admit(tenant, request)

    def created(self, job: Job) -> None:
        """Reserves the privacy budget that the job will spend."""
        self._privacy.reserve(job)

    def begin(self, job: Job, device_id: str) -> None:
        """Spends the privacy budget of the device's run. Raises BudgetExceeded."""
        self._privacy.begin(job, device_id)

    def ended(self, job: Job) -> None:
        """Releases the privacy budget that the job reserved and did not spend."""
        self._privacy.forget_reserved(job)
