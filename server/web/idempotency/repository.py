"""SQL for stored responses."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.web.idempotency.models import IdempotencyRecord


class IdempotencyRepository:
    """Idempotency records in one writing session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def claim(self, record: IdempotencyRecord, now: datetime) -> IdempotencyRecord:
        """Stores `record` and returns it, or returns the record already stored under its id.

        Waits while another transaction stores the same id, so that only one of two concurrent requests gets its own.
        """
        mine = IdempotencyRecord.id == record.id
        self._session.execute(delete(IdempotencyRecord).where(mine, IdempotencyRecord.kept_until <= now))
        try:
            with self._session.begin_nested():
                self._session.add(record)
        except IntegrityError:
            return self._session.scalars(select(IdempotencyRecord).where(mine)).one()
        return record

    def forget(self, now: datetime, limit: int) -> None:
        """Deletes up to `limit` expired records, except those that another transaction is deleting."""
        over = select(IdempotencyRecord.number).where(IdempotencyRecord.kept_until <= now).limit(limit)
        numbers = self._session.scalars(over.with_for_update(skip_locked=True)).all()
        self._session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.number.in_(numbers)))
