"""A round ends with a version: published in one transaction, in which its updates are forgotten. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.adapters.resolution import find_adapter, find_version
from server.adapters.service import AdapterService
from server.adapters.signature import RoundVersion
from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.clock import utc_now
from server.cohorts.models import Cohort, CohortRound
from server.cohorts.queue import Assignment, RoundQueue
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import RoundRepository
from server.cohorts.rounds import RoundService
from server.jobs.starts import parent_of
from server.privacy.cohorts import members_epsilon
from server.settings import Settings
from server.succession.service import KeyService
from shared.cohort import CohortOrigin, RoundState, UpdateState
from shared.job import Result


@dataclass(frozen=True)
class StoredFiles:
    """What a worker has stored of a round. adapter: the LoRA-B file's sha256; size: its bytes."""

    adapter: str
    size: int
    optimizer: str


@dataclass(frozen=True)
class Publisher:
    """Publications of one worker."""

    settings: Settings
    artifacts: ArtifactStore
    worker_id: str

    def publish(self, session: Session, assignment: Assignment, stored: StoredFiles) -> bool:
        """The round's version is there. False, and no version, if the round is not this worker's any more.

        Nor if a member left meanwhile: it is made again then, without his update. Raises AdapterNotFound.
        """
        # First, as a rotation of the key holds it.
        key = KeyService(session, self.settings).private()
        cohorts, rounds = CohortRepository(session), RoundRepository(session)
        queue = RoundQueue(session, self.settings, self.worker_id)
        cohort = cohorts.of_round_locked(assignment.round_id)
        found = queue.held(assignment.round_id)
        if found is None:
            return False
        counted = [part.sha256 for part in rounds.parts(found, UpdateState.COUNTED)]
        if counted != [update.sha256 for update in assignment.updates]:
            queue.release(assignment.round_id)
            return False
        hold(session, self.artifacts, [stored.adapter, stored.optimizer])
        adapter = find_adapter(session, cohort.tenant, cohort.name, lock=True)
        version = AdapterService(session).publish_round(adapter, self._version(session, assignment, stored, found), key)
        before = rounds.optimizer_of(cohort)
        if before is not None:
            before.optimizer_sha256 = None
        found.optimizer_sha256 = stored.optimizer
        found.state, found.version, found.ended_at = RoundState.PUBLISHED, version.version, utc_now()
        found.worker_id = found.lease_expires_at = None
        RoundService(session).ended(cohort, found)
        return True

    def _version(
        self, session: Session, assignment: Assignment, stored: StoredFiles, found: CohortRound
    ) -> RoundVersion:
        cohort = CohortRepository(session).by_number(found.cohort_number)
        settings, parent = cohort.settings, None
        if assignment.base_version is not None:
            adapter = find_adapter(session, cohort.tenant, cohort.name)
            parent = parent_of(find_version(session, adapter, f"v{assignment.base_version}", deleted=True))
        return RoundVersion(
            recipe=cohort.recipe,
            shape=cohort.shape,
            a_sha256=cohort.a_sha256,
            sha256=stored.adapter,
            size=stored.size,
            size_d=cohort.size_d,
            task=cohort.task,
            training=settings.training,
            result=_result(session, cohort, found, parent is not None),
            parent=parent,
            origin=CohortOrigin(
                cohort=cohort.name,
                round=found.position,
                updates=found.updates,
                algorithm=settings.algorithm,
                aggregator=settings.aggregator,
                optimizer=settings.optimizer,
                epsilon=members_epsilon(settings, RoundRepository(session).published_since(cohort, 0) + 1),
            ),
        )


def _result(session: Session, cohort: Cohort, found: CohortRound, started: bool) -> Result:
    """What its devices said together: accuracy before the round, their examples; nobody measured the new version."""
    said = RoundRepository(session).figures([found]).get(found.number)
    steps, before = cohort.settings.training.steps, None if said is None else said.start_accuracy
    return Result(
        steps=steps,
        best_step=steps,
        train_seconds=0,
        seconds=(utc_now() - found.opened_at).total_seconds(),
        peak_rss_bytes=0,
        train_examples=None if said is None or not said.examples else said.examples,
        truncated_examples=None,
        zero_shot_accuracy=None if started else before,
        start_accuracy=before if started else None,
    )
