"""All SQL about base models."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.bases.models import BaseModelEntry


class BaseRepository:
    """Base models in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, base: BaseModelEntry) -> None:
        """Stores a new base model."""
        self._session.add(base)
        self._session.flush()

    def by_name(self, name: str) -> BaseModelEntry | None:
        """The base model of that name."""
        return self._session.scalar(select(BaseModelEntry).where(BaseModelEntry.name == name))

    def all(self) -> Sequence[BaseModelEntry]:
        """Every base model, by name."""
        return self._session.scalars(select(BaseModelEntry).order_by(BaseModelEntry.name)).all()
