"""All SQL about runner builds."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.catalog.runner_builds.models import StoredRunnerBuild


class RunnerBuildRepository:
    """Runner builds in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, runner: StoredRunnerBuild) -> None:
        """Stores the first build of a platform."""
        self._session.add(runner)
        self._session.flush()

    def of_platform(self, platform: str) -> StoredRunnerBuild | None:
        """The build for a platform."""
        return self._session.scalar(select(StoredRunnerBuild).where(StoredRunnerBuild.platform == platform))

    def all(self) -> Sequence[StoredRunnerBuild]:
        """Every build, by platform."""
        return self._session.scalars(select(StoredRunnerBuild).order_by(StoredRunnerBuild.platform)).all()
