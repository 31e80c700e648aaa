"""All SQL about kept answers."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.answers.models import KeptAnswer


class AnswerRepository:
    """Kept answers in one writing session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def claim(self, answer: KeptAnswer, now: datetime) -> KeptAnswer:
        """`answer`, now stored, or the one that was stored before under its id.

        While another transaction stores the same id, waits for its end: of two at once, one gets its own.
        """
        mine = KeptAnswer.id == answer.id
        self._session.execute(delete(KeptAnswer).where(mine, KeptAnswer.kept_until <= now))
        try:
            with self._session.begin_nested():
                self._session.add(answer)
        except IntegrityError:
            return self._session.scalars(select(KeptAnswer).where(mine)).one()
        return answer

    def forget(self, now: datetime, limit: int) -> None:
        """Removes up to `limit` answers whose time is over, but those that another transaction is removing."""
        over = select(KeptAnswer.number).where(KeptAnswer.kept_until <= now).limit(limit)
        numbers = self._session.scalars(over.with_for_update(skip_locked=True)).all()
        self._session.execute(delete(KeptAnswer).where(KeptAnswer.number.in_(numbers)))
