"""The tables of what was spent on users' data and of their budgets, and all their SQL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Float, ForeignKey, Index, String, UniqueConstraint, delete, func, select
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Numbered, Table, UtcTime
from server.database.database import Repository, add_if_absent
from server.jobs.repository import Job
from shared.federation.accounting import Spending
from shared.job import JobState


class PrivacySpending(Numbered, Table):
    """One run of a private job, charged to its user, and to a data set of its device from the lease on.

    A second device that gets the job is a second run: the first one's may have been seen.
    """

    __tablename__ = "privacy_spendings"
    __table_args__ = (
        UniqueConstraint("job_id", "device_id"),
        Index("ix_privacy_spendings_user", "tenant", "user", "number"),
        # Answers alone, and without sorting, what was spent on a data set: read for each lease.
        Index(
            "ix_privacy_spendings_dataset",
            *("device_id", "dataset", "user", "sampling_rate", "noise_multiplier", "steps"),
        ),
        Index("ix_privacy_spendings_cohort", "tenant", "cohort", "user"),
    )

    tenant: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    cohort: Mapped[str | None] = mapped_column(String(96))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    dataset: Mapped[str] = mapped_column(String(96))  # on the device
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))  # None: no device has the job yet
    sampling_rate: Mapped[float] = mapped_column(Float)
    noise_multiplier: Mapped[float] = mapped_column(Float)
    steps: Mapped[int] = mapped_column()
    spent_at: Mapped[datetime] = mapped_column(UtcTime)


class PrivacyLimit(Numbered, Table):
    """A user's budget. Its row is what two jobs of one user wait for each other at."""

    __tablename__ = "privacy_limits"
    __table_args__ = (UniqueConstraint("tenant", "user"),)

    tenant: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    epsilon: Mapped[float | None] = mapped_column(Float)  # None: no limit any more
    delta: Mapped[float] = mapped_column(Float)


EXPOSED_STATES = (JobState.TRAINING, JobState.SUCCEEDED)  # states of jobs whose runs may have been seen


class PrivacyRepository(Repository):
    """Spendings and budgets in one session."""

    def of_job(self, job_id: str) -> Sequence[PrivacySpending]:
        """A job's runs, the first one first."""
        return self._all(PrivacySpending, PrivacySpending.job_id == job_id)

    def forget_reserved(self, job_id: str) -> None:
        """Deletes a job's reservation that no device has begun to spend."""
        conditions = PrivacySpending.job_id == job_id, PrivacySpending.device_id.is_(None)
        self._session.execute(delete(PrivacySpending).where(*conditions))

    def of_user(self, tenant: str, user: str) -> list[Spending]:
        """Returns all spendings and reservations on a user's data."""
        return self._sums(PrivacySpending.tenant == tenant, PrivacySpending.user == user).get(user, [])

    def of_dataset(self, device_id: str, dataset: str) -> dict[str, list[Spending]]:
        """Returns the privacy that runs have spent on a device's data set, by the user of the job."""
        return self._sums(PrivacySpending.device_id == device_id, PrivacySpending.dataset == dataset)

    def datasets_of(self, device_id: str) -> dict[str, int]:
        """Returns the number of private runs of each data set of a device, by its name."""
        row = PrivacySpending
        statement = select(row.dataset, func.count()).where(row.device_id == device_id).group_by(row.dataset)
        return {dataset: runs for dataset, runs in self._session.execute(statement.order_by(row.dataset))}  # noqa: C416

    def of_cohort(self, tenant: str, cohort: str) -> dict[str, list[Spending]]:
        """Returns the privacy that a cohort's rounds have spent on each user's examples."""
        return self._sums(PrivacySpending.tenant == tenant, PrivacySpending.cohort == cohort)

    def _sums(self, *conditions: ColumnElement[bool]) -> dict[str, list[Spending]]:
        row = PrivacySpending
        columns = row.user, row.sampling_rate, row.noise_multiplier
        statement = select(*columns, func.sum(row.steps)).where(*conditions).group_by(*columns)
        sums: dict[str, list[Spending]] = {}
        for user, rate, noise, steps in self._session.execute(statement):
            sums.setdefault(user, []).append(Spending(sampling_rate=rate, noise_multiplier=noise, times=int(steps)))
        return sums

    def runs(self, tenant: str, user: str) -> int:
        """Returns the number of private runs of a user's data, reserved ones included."""
        return self._count(PrivacySpending.tenant == tenant, PrivacySpending.user == user)

    def unprotected(self, tenant: str, user: str) -> int:
        """Returns the number of jobs without privacy that trained, or are training, on a user's data."""
        private = select(PrivacySpending.job_id).where(PrivacySpending.tenant == tenant, PrivacySpending.user == user)
        exposed = Job.state.in_(EXPOSED_STATES), Job.id.not_in(private)
        return self._count(Job.tenant == tenant, Job.user == user, *exposed)

    def limit(self, tenant: str, user: str, *, lock: bool = False) -> PrivacyLimit | None:
        """Returns a user's budget. lock: other transactions that lock it wait until this one ends."""
        statement = select(PrivacyLimit).where(PrivacyLimit.tenant == tenant, PrivacyLimit.user == user)
        return self._session.scalar(statement.with_for_update() if lock else statement)

    def has_limits(self, tenant: str) -> bool:
        """Returns whether any user of a tenant has a budget."""
        conditions = PrivacyLimit.tenant == tenant, PrivacyLimit.epsilon.is_not(None)
        return self._session.scalar(select(PrivacyLimit.user).where(*conditions).limit(1)) is not None

    def limits(self, tenant: str, users: Collection[str]) -> Sequence[PrivacyLimit]:
        """Returns the budgets of those `users` that have one, the smallest epsilon first."""
        conditions = PrivacyLimit.tenant == tenant, PrivacyLimit.user.in_(users), PrivacyLimit.epsilon.is_not(None)
        limits = self._session.scalars(select(PrivacyLimit).where(*conditions))
        return sorted(limits, key=lambda limit: (limit.epsilon or 0.0, limit.delta))

    def set_limit(self, tenant: str, user: str, epsilon: float | None, delta: float) -> None:
        """Sets a user's budget, which holds from the next job on."""
        add_if_absent(self._session, PrivacyLimit, tenant=tenant, user=user, epsilon=epsilon, delta=delta)
        limit = self.limit(tenant, user, lock=True)
        if limit is not None:
            limit.epsilon, limit.delta = epsilon, delta
            self._session.flush()
