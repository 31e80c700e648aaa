"""The tables of what was spent on users' data, and of their budgets."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Float, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Moment, Numbered, Table
from shared.federation.accounting import Spending


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
    spent_at: Mapped[datetime] = mapped_column(Moment)

    @property
    def spending(self) -> Spending:
        """As it is accounted for."""
        rate, noise = self.sampling_rate, self.noise_multiplier
        return Spending(sampling_rate=rate, noise_multiplier=noise, times=self.steps)


class PrivacyLimit(Numbered, Table):
    """A user's budget. Its row is what two jobs of one user wait for each other at."""

    __tablename__ = "privacy_limits"
    __table_args__ = (UniqueConstraint("tenant", "user"),)

    tenant: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    epsilon: Mapped[float | None] = mapped_column(Float)  # None: no limit any more
    delta: Mapped[float] = mapped_column(Float)
