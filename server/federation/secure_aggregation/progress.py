"""Advances the phases of masked rounds and computes their sums, for rounds and their worker."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.models import CohortRound
from server.federation.secure_aggregation.models import SecureAggregationRound
from server.federation.secure_aggregation.repository import DatabaseStore, SecureAggregationRepository
from server.storage.store import ArtifactStore
from shared.errors import LeftOutOfRound
from shared.federation.secure_aggregation.fixed_point import Total
from shared.federation.secure_aggregation.messages import Phase
from shared.federation.secure_aggregation.server import unmask_sum
from shared.federation.secure_aggregation.session import SecureAggregationSession


class SecureAggregationProgress:
    """Manages the phases of masked rounds in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session, self._repository = session, SecureAggregationRepository(session)

    def tick(self, masked: SecureAggregationRound) -> Phase:
        """Ends the current phase of a locked masked round if it is complete or late. Returns the resulting phase."""
        self._session.flush()
        failed_members = self._repository.failed_members(masked.round_number)
        expects_members = self._repository.expects_members(masked.round_number)
        return self._secure_aggregation(masked).tick(expects_members, masked.least, failed_members)

    def advance(self, cohort_round: CohortRound) -> SecureAggregationRound | None:
        """Returns the masked round of a cohort's round, locked, after `tick`. None: no device has taken part yet."""
        masked = self._repository.locked(cohort_round.number)
        if masked is not None:
            self.tick(masked)
        return masked

    def summed(self, masked: SecureAggregationRound) -> dict[int, str]:
        """Returns the sha256 of each masked vector in the sum, by job number."""
        there = {row.member for row in self._secure_aggregation(masked).in_sum()}
        members = self._repository.members(masked.round_number)
        return {row.job_number: row.vector_sha256 or "" for row in members if row.member in there}

    def is_summed(self, cohort_round: CohortRound, device_id: str) -> bool:
        """Returns whether all phases of a round are over and a device's vector is in the sum."""
        masked = self._repository.get(cohort_round.number)
        if masked is None or masked.phase not in (Phase.SUMMING, Phase.DONE):
            return False
        return device_id in {row.member for row in self._secure_aggregation(masked).in_sum()}

    def finish(self, cohort_round: CohortRound, why: str | None = None) -> None:
        """Discards the shares and vectors of a round that has ended. why: the reason if the round was abandoned."""
        masked = self._repository.locked(cohort_round.number)
        if masked is not None and masked.phase not in (Phase.DONE, Phase.FAILED):
            self._secure_aggregation(masked).finish(why)

    def _secure_aggregation(self, masked: SecureAggregationRound) -> SecureAggregationSession:
        return SecureAggregationSession(
            DatabaseStore(self._session, masked), masked.parameters, masked.phase_seconds, utc_now()
        )


def round_total(database: Database, artifacts: ArtifactStore, round_id: str) -> Total:
    """Returns the decoded sum of a cohort's round in phase SUMMING. Uses O(D) memory, outside of transactions.

    Raises Untrusted or InvalidUpload if the shares or vectors of the devices are inconsistent.
    """
    with database.reading() as session:
        masked = SecureAggregationRepository(session).of_round(round_id)
        if masked is None:
            raise LeftOutOfRound("no device took part in the masked round")
        aggregation = SecureAggregationSession(
            DatabaseStore(session, masked), masked.parameters, masked.phase_seconds, utc_now()
        )
        inputs, vectors = aggregation.unmasking_inputs(), [row.vector_sha256 or "" for row in aggregation.in_sum()]
    return unmask_sum(inputs, (artifacts.read(sha256) for sha256 in vectors))
