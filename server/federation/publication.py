"""Publishes the version of a round and releases the round's updates, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.federation.arithmetic import RoundOrder
from server.federation.models import Cohort, CohortRound
from server.federation.privacy.cohorts import members_epsilon
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.identity.signing_keys.service import KeyService
from server.registry.repository import find_adapter, find_version
from server.registry.service import AdapterService, RoundVersion
from server.registry.warm_start import parent_of
from server.settings import Settings
from server.storage.store import ArtifactStore, hold
from shared.federation.cohort import CohortOrigin, RoundState, UpdateState
from shared.job import Result


@dataclass(frozen=True)
class StoredFiles:
    """The files that a worker stored for a round. adapter, optimizer: sha256. size: bytes of the LoRA-B file."""

    adapter: str
    size: int
    optimizer: str


@dataclass(frozen=True)
class Publisher:
    """Publishes the versions of rounds in one worker."""

    settings: Settings
    artifacts: ArtifactStore

    def publish(self, session: Session, order: RoundOrder, stored: StoredFiles) -> bool:
        """Publishes the round's version, with the cohort locked. Raises AdapterNotFound.

        Returns False and publishes nothing if a member has left: the version must be recomputed without that update.
        """
        key = KeyService(session, self.settings).private()
        rounds = RoundRepository(session)
        cohort_round = rounds.get_one(order.round_id)
        cohort = CohortRepository(session).by_number(cohort_round.cohort_number)
        counted = [part.sha256 for part in rounds.parts(cohort_round, UpdateState.COUNTED)]
        if counted != [update.sha256 for update in order.updates]:
            return False
        hold(session, self.artifacts, [stored.adapter, stored.optimizer])
        adapter = find_adapter(session, cohort.tenant, cohort.name, lock=True)
        version = AdapterService(session).publish_round(
            adapter, self._version(session, order, stored, cohort_round), key
        )
        before = rounds.optimizer_of(cohort)
        if before is not None:
            before.optimizer_sha256 = None
        cohort_round.optimizer_sha256 = stored.optimizer
        cohort_round.state, cohort_round.ended_at = RoundState.PUBLISHED, utc_now()
        cohort_round.version = version.version
        RoundService(session).ended(cohort, cohort_round)
        return True

    def _version(
        self, session: Session, order: RoundOrder, stored: StoredFiles, cohort_round: CohortRound
    ) -> RoundVersion:
        cohort = CohortRepository(session).by_number(cohort_round.cohort_number)
        settings, parent = cohort.settings, None
        if order.base_version is not None:
            adapter = find_adapter(session, cohort.tenant, cohort.name)
            parent = parent_of(find_version(session, adapter, f"v{order.base_version}", deleted=True))
        return RoundVersion(
            recipe=cohort.recipe,
            shape=cohort.shape,
            a_sha256=cohort.a_sha256,
            sha256=stored.adapter,
            size=stored.size,
            size_d=cohort.size_d,
            task=cohort.task,
            training=settings.training,
            result=_result(session, cohort, cohort_round, parent is not None),
            parent=parent,
            origin=CohortOrigin(
                cohort=cohort.name,
                round=cohort_round.position,
                updates=cohort_round.updates,
                algorithm=settings.algorithm,
                aggregator=settings.aggregator,
                optimizer=settings.optimizer,
                epsilon=members_epsilon(settings, RoundRepository(session).published_since(cohort, 0) + 1),
            ),
        )


def _result(session: Session, cohort: Cohort, cohort_round: CohortRound, started: bool) -> Result:
    """Returns the devices' mean accuracy before the round and their number of examples; None if they are private.

    The new version itself has not been measured.
    """
    figures = RoundRepository(session).figures([cohort_round]).get(cohort_round.number)
    steps, before = cohort.settings.training.steps, None if figures is None else figures.start_accuracy
    return Result(
        steps=steps,
        best_step=steps,
        train_seconds=0,
        seconds=(utc_now() - cohort_round.opened_at).total_seconds(),
        peak_rss_bytes=0,
        train_examples=None if figures is None or not figures.examples else figures.examples,
        truncated_examples=None,
        zero_shot_accuracy=None if started else before,
        start_accuracy=before if started else None,
    )
