"""The periodic sweep over rounds: enforces deadlines, submits missing jobs, opens the next rounds.

Any number of workers may run it at once: each cohort's row is locked, and every action is idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.models import Cohort
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.storage.store import ArtifactStore


@dataclass(frozen=True)
class RoundWatch:
    """Runs the sweep in one worker."""

    database: Database
    artifacts: ArtifactStore

    def look(self) -> None:
        """Performs every due action."""
        # First without locks, so that cohorts that wait for an approval do not block other writers.
        with self.database.reading() as session:
            due = [number for number in RoundRepository(session).due(utc_now()) if _may_act(session, number)]
            ready = [number for number in CohortRepository(session).to_open() if _may_open(session, number)]
        for number in due:
            with self.database.writing() as session:
                cohort = CohortRepository(session).by_number_locked(number)
                RoundService(session).end_if_due(cohort)
                RoundService(session).issue(cohort, self.artifacts)
        for number in ready:
            with self.database.writing() as session:
                self._open(session, CohortRepository(session).by_number_locked(number))

    def _open(self, session: Session, cohort: Cohort) -> None:
        rounds = RoundService(session)
        if cohort.opens and rounds.may_open(cohort):
            rounds.open(cohort, self.artifacts)


def _may_act(session: Session, number: int) -> bool:
    """Returns whether an action other than waiting for an approval is due."""
    cohort = CohortRepository(session).by_number(number)
    return not RoundService(session).holds_back(cohort) or RoundRepository(session).ends(cohort, utc_now())


def _may_open(session: Session, number: int) -> bool:
    return RoundService(session).may_open(CohortRepository(session).by_number(number))
