"""Ratings of texts that versions wrote on the dashboard's page "Try it": their table, SQL and rules.

Stored only for a tenant whose quota of ratings an administrator has raised above 0, and deleted with their version.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, Text, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, utc_now
from server.identity.quotas import Quota, QuotaService
from server.registry.models import Adapter, StoredVersion


class Rating(Numbered, Table):
    """Whether a person liked one text of a version. A record for tasks of kind `preference` with loss `kto`."""

    __tablename__ = "ratings"

    tenant: Mapped[str] = mapped_column(String(96), index=True)
    version_number: Mapped[int] = mapped_column(ForeignKey("adapter_versions.number", ondelete="CASCADE"), index=True)
    prompt: Mapped[str] = mapped_column(Text)
    completion: Mapped[str] = mapped_column(Text)
    label: Mapped[bool] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class RatingService:
    """Ratings in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def allowed(self, tenant: str) -> bool:
        """Returns whether a tenant's people may rate texts."""
        return QuotaService(self._session).limits(tenant)[Quota.RATINGS] > 0

    def add(self, tenant: str, version: StoredVersion, prompt: str, completion: str, *, label: bool) -> None:
        """Stores a rating. label: the person liked the text. Raises QuotaExceeded."""
        facts = {"prompt": prompt, "completion": completion, "label": label}
        self._session.add(Rating(tenant=tenant, version_number=version.number, created_at=utc_now(), **facts))
        self._session.flush()
        QuotaService(self._session).check(tenant, Quota.RATINGS, lambda: self.count(tenant))

    def count(self, tenant: str) -> int:
        """Returns how many ratings a tenant has stored."""
        return self._session.scalar(select(func.count()).select_from(Rating).where(Rating.tenant == tenant)) or 0

    def records(self, adapter: Adapter) -> Iterator[dict[str, Any]]:
        """Yields the ratings of all versions of an adapter, oldest first, as records for training."""
        own = select(StoredVersion.number).where(StoredVersion.adapter_number == adapter.number)
        statement = select(Rating).where(Rating.version_number.in_(own)).order_by(Rating.number)
        for rating in self._session.scalars(statement):
            yield {"prompt": rating.prompt, "completion": rating.completion, "label": rating.label}
