"""Who makes a round's version: workers claim rounds, keep them by heartbeats, and end with a version or a reason.

As with conversions (`server.formats.queue`), the table decides: a worker that is killed stops its heartbeats, and the
round is another's when its time is over. It begins anew then, from the same updates; what a worker would report that
lost its claim counts no more, so a round makes one version. Knows no files and no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.adapters.resolution import find_adapter, find_version
from server.clock import utc_now
from server.cohorts.models import Cohort, CohortRound
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import RoundRepository
from server.cohorts.rounds import RoundService
from server.programs.room import backoff
from server.settings import Settings
from shared.cohort import CohortSettings, UpdateState
from shared.errors import NotFound
from shared.federation.update import Contribution
from shared.recipe import Recipe

MOST_LOOKED_AT = 100  # rounds, until one is found that may be begun
_HELD_SECONDS = 10  # until it is looked again whether a person approved what a version is to be made from


@dataclass(frozen=True)
class Counted:
    """An update that counts. sha256, start_sha256: LoRA-B files after and before the run; None: B = 0."""

    contribution: Contribution
    sha256: str
    start_sha256: str | None


@dataclass(frozen=True)
class Assignment:
    """What a worker has to make a version of. base_sha256: the LoRA-B that the optimizer moves; None: B = 0."""

    round_id: str
    cohort: str
    position: int
    settings: CohortSettings
    recipe: Recipe
    a_sha256: str
    size_d: int
    base_version: int | None
    base_sha256: str | None
    optimizer_sha256: str | None
    updates: tuple[Counted, ...]


class RoundQueue:
    """Rounds whose version is to be made, in one writing transaction."""

    def __init__(self, session: Session, settings: Settings, worker_id: str) -> None:
        self._session, self._settings, self._worker_id = session, settings, worker_id
        self._rounds, self._cohorts = RoundRepository(session), CohortRepository(session)
        self._service = RoundService(session)

    def claim(self) -> Assignment | None:
        """The first round whose version is to be made, now this worker's; or None.

        One whose workers died too often, or whose start is gone, is abandoned here.
        """
        now = utc_now()
        for round_id in self._rounds.startable(now, MOST_LOOKED_AT):
            cohort = self._cohorts.of_round_locked(round_id)  # before the round, as `server.db.locking` says
            found = self._rounds.claimable(round_id, now)
            if found is None:
                continue
            if found.worker_id is not None and not self._lost(cohort, found):
                continue
            if cohort.settings.algorithm.asynchronous and self._service.waits_for_approval(cohort):
                found.next_attempt_at = now + timedelta(seconds=_HELD_SECONDS)
                continue
            try:
                base = self._base(cohort, found)
            except NotFound as error:
                self._service.abandon(cohort, found, f"what it started from is gone: {error.detail}")
                continue
            found.worker_id, found.lease_expires_at = self._worker_id, self._lease()
            found.attempts += 1
            return self._assignment(cohort, found, base)
        return None

    def _base(self, cohort: Cohort, found: CohortRound) -> StoredVersion | None:
        """What the version is made from: a synchronous round's start; an asynchronous one's is what is `main` now."""
        if cohort.settings.algorithm.asynchronous:
            return self._service.head(cohort)
        if found.start is None:
            return None
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        return find_version(self._session, adapter, found.start.revision, deleted=True)

    def _assignment(self, cohort: Cohort, found: CohortRound, base: StoredVersion | None) -> Assignment:
        parts = self._rounds.parts(found, UpdateState.COUNTED)
        members, moved = self._rounds.members_of(parts), self._rounds.optimizer_of(cohort)
        return Assignment(
            round_id=found.id,
            cohort=cohort.name,
            position=found.position,
            settings=cohort.settings,
            recipe=cohort.recipe,
            a_sha256=cohort.a_sha256,
            size_d=cohort.size_d,
            base_version=None if base is None else base.version,
            base_sha256=None if base is None else base.sha256,
            optimizer_sha256=None if moved is None else moved.optimizer_sha256,
            updates=tuple(
                Counted(
                    Contribution(members[part.member_number].user, part.examples or 0, part.staleness or 0),
                    part.sha256,
                    part.start_sha256,
                )
                for part in parts
                if part.sha256 is not None
            ),
        )

    def keep(self, round_id: str) -> bool:
        """A heartbeat. False if the round is another's, or has ended."""
        found = self.held(round_id)
        if found is None:
            return False
        found.lease_expires_at = self._lease()
        return True

    def held(self, round_id: str) -> CohortRound | None:
        """The round, if it is still this worker's; its cohort is locked, and it."""
        self._cohorts.of_round_locked(round_id)
        return self._rounds.held(round_id, self._worker_id)

    def fail(self, round_id: str, why: str) -> None:
        """No version can be made of these updates; the round is abandoned."""
        found = self.held(round_id)
        if found is not None:
            self._service.abandon(self._cohorts.by_number(found.cohort_number), found, why)

    def retry(self, round_id: str, why: str) -> None:
        """Something was in the way: another try after a while; or the end, if there were enough."""
        found = self.held(round_id)
        if found is None:
            return
        if found.attempts >= self._settings.compile_attempts:
            self._service.abandon(self._cohorts.by_number(found.cohort_number), found, why)
            return
        _let_go(found)
        found.next_attempt_at = utc_now() + backoff(self._settings, found.attempts)

    def release(self, round_id: str) -> None:
        """The worker stops, or the updates changed meanwhile; the try does not count."""
        found = self.held(round_id)
        if found is not None:
            _let_go(found)
            found.attempts -= 1

    def vanished(self, round_id: str, worker_id: str) -> None:
        """Takes a round back from a worker whose process is known to be dead, before its time is over."""
        cohort = self._cohorts.of_round_locked(round_id)
        found = self._rounds.held(round_id, worker_id)
        if found is not None:
            self._lost(cohort, found)

    def _lost(self, cohort: Cohort, found: CohortRound) -> bool:
        """The worker died; perhaps the round killed it. Whether it may be tried again."""
        if found.attempts >= self._settings.compile_attempts:
            self._service.abandon(cohort, found, "its worker was killed every time; is there enough memory?")
            return False
        _let_go(found)
        return True

    def _lease(self) -> datetime:
        return utc_now() + timedelta(seconds=self._settings.compile_lease_seconds)


def _let_go(found: CohortRound) -> None:
    found.worker_id = found.lease_expires_at = None
