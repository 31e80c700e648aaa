"""The handler of aggregation tasks, which produce and publish the adapter version of a cohort's round.

An interrupted attempt is repeated with the same updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sqlalchemy.orm import Session

from server.database.columns import utc_now, view_of
from server.database.database import Database
from server.federation.arithmetic import CountedUpdate, NoVersion, RoundOrder, StoredFiles, make_version
from server.federation.models import AGGREGATE, Cohort, CohortRound
from server.federation.privacy.cohorts import members_epsilon
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.federation.secure_aggregation.service import round_total
from server.identity.signing_keys.service import KeyService
from server.registry.models import StoredVersion
from server.registry.repository import find_adapter, find_version
from server.registry.service import AdapterService
from server.registry.warm_start import parent_of
from server.settings import Settings
from server.storage.store import ArtifactStore, hold
from server.tasks.handlers import Handler, Postponed, TaskRun
from shared.errors import InvalidUpload, MobizoError, NotFound, Untrusted
from shared.federation.cohort import CohortOrigin, RoundState, UpdateState
from shared.federation.secure_aggregation.fixed_point import Total
from shared.federation.update import Contribution
from shared.result import Result

_HELD_SECONDS = 10  # between checks whether the starting version was approved


@dataclass(frozen=True)
class AggregationHandler(Handler):
    """Produces the versions of rounds in the worker's own process, in O(D) memory."""

    settings: Settings
    database: Database
    artifacts: ArtifactStore

    kind: ClassVar[str] = AGGREGATE
    subject_name: ClassVar[str] = "round"

    def begin(self, session: Session, subject: str) -> RoundOrder | None:
        """Raises Postponed while the starting version waits for approval, or NoVersion if it was deleted."""
        cohort, cohort_round = self._locked_round(session, subject)
        if cohort_round.state is not RoundState.AGGREGATING:
            return None
        service = RoundService(session)
        if cohort.settings.algorithm.asynchronous and service.waits_for_approval(cohort):
            raise Postponed(_HELD_SECONDS)
        try:
            base = service.start_of(cohort, cohort_round, deleted=True)
        except NotFound as error:
            raise NoVersion(f"the version that the round started from is gone: {error.detail}") from error
        return _order(RoundRepository(session), cohort, cohort_round, base)

    def heartbeat(self, session: Session, order: RoundOrder) -> bool:
        """Returns whether the round still waits for its version."""
        return RoundRepository(session).get_one(order.round_id).state is RoundState.AGGREGATING

    def run(self, order: RoundOrder, run: TaskRun) -> StoredFiles:
        """Aggregates the updates and stores the resulting files."""
        return make_version(self.artifacts, order, self._total(order))

    def publish(self, session: Session, order: RoundOrder, result: StoredFiles) -> bool:
        """Publishes the version, with the signing key locked, and then the cohort. Raises AdapterNotFound.

        Returns False if a member has left: the version is recomputed without that update.
        """
        key, rounds = KeyService(session, self.settings).private(), RoundRepository(session)
        cohort, cohort_round = self._locked_round(session, order.round_id)
        if cohort_round.state is not RoundState.AGGREGATING:
            return False
        counted = [part.sha256 for part in rounds.parts(cohort_round, UpdateState.COUNTED)]
        if counted != [update.sha256 for update in order.updates]:
            return False
        hold(session, self.artifacts, [result.adapter, result.optimizer])
        adapter, parent = find_adapter(session, cohort.tenant, cohort.name, lock=True), None
        if order.base_version is not None:
            parent = parent_of(find_version(session, adapter, f"v{order.base_version}", deleted=True))
        version = StoredVersion(
            recipe=cohort.recipe,
            shape=cohort.shape,
            recipe_id=cohort.recipe.id,
            a_sha256=cohort.a_sha256,
            sha256=result.adapter,
            size=result.size,
            stored_bytes=result.size,
            size_d=cohort.size_d,
            result=_result(rounds, cohort, cohort_round, parent is not None),
        )
        AdapterService(session).publish_round(
            adapter,
            version,
            key,
            task=cohort.task,
            training=cohort.settings.training,
            parent=parent,
            origin=_origin(rounds, cohort, cohort_round),
        )
        before = rounds.optimizer_of(cohort)
        if before is not None:
            before.optimizer_sha256 = None
        cohort_round.optimizer_sha256 = result.optimizer
        cohort_round.state, cohort_round.ended_at = RoundState.PUBLISHED, utc_now()
        cohort_round.version = version.version
        RoundService(session).ended(cohort, cohort_round)
        return True

    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Abandons the round."""
        cohort, cohort_round = self._locked_round(session, subject)
        if cohort_round.state is RoundState.AGGREGATING:
            RoundService(session).abandon(cohort, cohort_round, error.detail)

    def is_transient(self, error: MobizoError) -> bool:
        """Returns whether a retry may succeed: always, unless the updates themselves are at fault."""
        return not isinstance(error, NoVersion)

    def _locked_round(self, session: Session, subject: str) -> tuple[Cohort, CohortRound]:
        """Returns a round and its cohort, which guards it, locked."""
        return CohortRepository(session).of_round_locked(subject), RoundRepository(session).get_one(subject)

    def _total(self, order: RoundOrder) -> Total | None:
        """Returns the sum of a round's masked updates, or None if they are not masked. Raises NoVersion."""
        if order.settings.masking is None:
            return None
        try:
            return round_total(self.database, self.artifacts, order.round_id)
        except (Untrusted, InvalidUpload) as error:
            raise NoVersion(error.detail) from error


def _order(
    rounds: RoundRepository, cohort: Cohort, cohort_round: CohortRound, base: StoredVersion | None
) -> RoundOrder:
    parts = rounds.parts(cohort_round, UpdateState.COUNTED)
    optimizer_round = rounds.optimizer_of(cohort)
    return RoundOrder(
        round_id=cohort_round.id,
        cohort=cohort.name,
        position=cohort_round.position,
        settings=cohort.settings,
        recipe=cohort.recipe,
        a_sha256=cohort.a_sha256,
        size_d=cohort.size_d,
        base_version=None if base is None else base.version,
        base_sha256=None if base is None else base.sha256,
        optimizer_sha256=None if optimizer_round is None else optimizer_round.optimizer_sha256,
        updates=tuple(
            CountedUpdate(
                Contribution(part.member.user, part.examples or 0, part.staleness or 0),
                part.sha256,
                part.start_sha256,
            )
            for part in parts
            if part.sha256 is not None
        ),
    )


def _origin(rounds: RoundRepository, cohort: Cohort, cohort_round: CohortRound) -> CohortOrigin:
    settings = cohort.settings
    return view_of(
        CohortOrigin,
        settings,
        cohort=cohort.name,
        round=cohort_round.position,
        updates=cohort_round.updates,
        epsilon=members_epsilon(settings, rounds.published_since(cohort, 0) + 1),
    )


def _result(rounds: RoundRepository, cohort: Cohort, cohort_round: CohortRound, started: bool) -> Result:
    """Returns the devices' mean accuracy before the round and their number of examples; None if they are private.

    The new version itself has not been measured.
    """
    figures = rounds.figures([cohort_round]).get(cohort_round.number)
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
