"""All SQL about runner builds."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.runners.models import Runner


class RunnerRepository:
    """Runner builds in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, runner: Runner) -> None:
        """Stores the first build of a platform."""
        self._session.add(runner)
        self._session.flush()

    def of_platform(self, platform: str) -> Runner | None:
        """The build for a platform."""
        return self._session.scalar(select(Runner).where(Runner.platform == platform))

    def all(self) -> Sequence[Runner]:
        """Every build, by platform."""
        return self._session.scalars(select(Runner).order_by(Runner.platform)).all()
