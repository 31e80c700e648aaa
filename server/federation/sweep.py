"""The periodic sweep over rounds: enforces deadlines, submits missing jobs, opens the next rounds.

Any number of workers may run it at once: each cohort's row is locked, and every action is idempotent.
"""

from __future__ import annotations

from functools import partial

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.storage.store import ArtifactStore
from server.tasks.sweeps import run_guarded

ROUNDS = "rounds"  # the name of the sweep


def watch_rounds(database: Database, artifacts: ArtifactStore) -> None:
    """Performs every due action."""
    # First without locks, so that cohorts that wait for an approval do not block other writers.
    with database.reading() as session:
        cohorts, rounds, service = CohortRepository(session), RoundRepository(session), RoundService(session)
        due = [
            number
            for number in rounds.due(utc_now())
            if not service.holds_back(cohort := cohorts.by_number(number)) or rounds.ends(cohort, utc_now())
        ]
        ready = [number for number in cohorts.to_open() if service.may_open(cohorts.by_number(number))]
    # Each cohort by itself, so that one that fails does not stop the others.
    for act, numbers in ((_end, due), (_open, ready)):
        for number in numbers:
            run_guarded(database, ROUNDS, partial(act, database, artifacts, number), f"cohort {number}")


def _end(database: Database, artifacts: ArtifactStore, number: int) -> None:
    with database.writing() as session:
        cohort = CohortRepository(session).by_number(number, lock=True)
        RoundService(session).end_if_due(cohort)
        RoundService(session).issue(cohort, artifacts)


def _open(database: Database, artifacts: ArtifactStore, number: int) -> None:
    with database.writing() as session:
        cohort, rounds = CohortRepository(session).by_number(number, lock=True), RoundService(session)
        if cohort.opens and rounds.may_open(cohort):
            rounds.open(cohort, artifacts)
