"""What a worker does for rounds now and then: deadlines, jobs that lack, the next round. Knows no HTTP.

Any number of workers may: each cohort's row is locked meanwhile, and what was done is not done again.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.artifacts.store import ArtifactStore
from server.clock import utc_now
from server.cohorts.models import Cohort
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import RoundRepository
from server.cohorts.rounds import RoundService
from server.db.database import Database


@dataclass(frozen=True)
class RoundWatch:
    """The watch of one worker."""

    database: Database
    artifacts: ArtifactStore

    def look(self) -> None:
        """Does what is due."""
        # Looked at without a lock first, so that what waits for people does not keep other writers waiting.
        with self.database.reading() as session:
            due = [number for number in RoundRepository(session).due(utc_now()) if _may_act(session, number)]
            ready = [number for number in CohortRepository(session).to_open() if _may_open(session, number)]
        for number in due:
            with self.database.writing() as session:
                cohort = CohortRepository(session).by_number_locked(number)
                RoundService(session).settle(cohort)
                RoundService(session).issue(cohort, self.artifacts)
        for number in ready:
            with self.database.writing() as session:
                self._open(session, CohortRepository(session).by_number_locked(number))

    def _open(self, session: Session, cohort: Cohort) -> None:
        rounds = RoundService(session)
        if cohort.opens and rounds.may_open(cohort):
            rounds.open(cohort, self.artifacts)


def _may_act(session: Session, number: int) -> bool:
    """Whether there is something to do but to wait for a person's approval."""
    cohort = CohortRepository(session).by_number(number)
    return not RoundService(session).holds_back(cohort) or RoundRepository(session).ends(cohort, utc_now())


def _may_open(session: Session, number: int) -> bool:
    return RoundService(session).may_open(CohortRepository(session).by_number(number))
