"""Masked rounds: their phases, the messages of devices under the leases of their jobs, and the sum.

A masked round begins when the first of its devices has trained. A phase ends in the transaction of the message that
completes it. After its deadline, the next poll of a device or the periodic sweep of rounds ends it.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.models import CohortRound, secure_aggregation_parameters
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.secure_aggregation.repository import (
    DatabaseStore,
    SecureAggregationRepository,
    SecureAggregationRound,
)
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job
from server.storage.store import ArtifactStore
from shared.errors import Conflict, LeftOutOfRound
from shared.federation.cohort import RoundState
from shared.federation.secure_aggregation.fixed_point import Total, vector_bytes
from shared.federation.secure_aggregation.messages import Phase, SecureAggregationView
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
        return _aggregation(self._session, masked).tick(expects_members, masked.least, failed_members)

    def advance(self, cohort_round: CohortRound) -> SecureAggregationRound | None:
        """Returns the masked round of a cohort's round, locked, after `tick`. None: no device has taken part yet."""
        masked = self._repository.locked(cohort_round.number)
        if masked is not None:
            self.tick(masked)
        return masked

    def summed(self, masked: SecureAggregationRound) -> dict[int, str]:
        """Returns the sha256 of each masked vector in the sum, by job number."""
        there = {row.member for row in _aggregation(self._session, masked).in_sum()}
        rows = DatabaseStore(self._session, masked).rows()
        return {row.job_number: row.vector_sha256 or "" for row in rows if row.member in there}

    def is_summed(self, cohort_round: CohortRound, device_id: str) -> bool:
        """Returns whether all phases of a round are over and a device's vector is in the sum."""
        masked = self._repository.get(cohort_round.number)
        if masked is None or masked.phase not in (Phase.SUMMING, Phase.DONE):
            return False
        return device_id in {row.member for row in _aggregation(self._session, masked).in_sum()}

    def finish(self, cohort_round: CohortRound, why: str | None = None) -> None:
        """Discards the shares and vectors of a round that has ended. why: the reason if the round was abandoned."""
        masked = self._repository.locked(cohort_round.number)
        if masked is not None and masked.phase not in (Phase.DONE, Phase.FAILED):
            _aggregation(self._session, masked).finish(why)


def _aggregation(
    session: Session, masked: SecureAggregationRound, artifacts: ArtifactStore | None = None, job_number: int = 0
) -> SecureAggregationSession:
    """Returns the session over a masked round. artifacts, job_number: as for DatabaseStore."""
    store = DatabaseStore(session, masked, artifacts, job_number)
    return SecureAggregationSession(store, masked.parameters, masked.phase_seconds, utc_now())


def round_total(database: Database, artifacts: ArtifactStore, round_id: str) -> Total:
    """Returns the decoded sum of a cohort's round in phase SUMMING. Uses O(D) memory, outside of transactions.

    Raises Untrusted or InvalidUpload if the shares or vectors of the devices are inconsistent.
    """
    with database.reading() as session:
        masked = SecureAggregationRepository(session).get(RoundRepository(session).get_one(round_id).number)
        if masked is None:
            raise LeftOutOfRound("no device took part in the masked round")
        aggregation = _aggregation(session, masked)
        inputs, vectors = aggregation.unmasking_inputs(), [row.vector_sha256 or "" for row in aggregation.in_sum()]
    return unmask_sum(inputs, (artifacts.read(sha256) for sha256 in vectors))


class SecureAggregationService:
    """Handles the messages of devices in masked rounds."""

    def __init__(self, session: Session, artifacts: ArtifactStore, lease_seconds: float) -> None:
        self._session, self._artifacts, self._lease_seconds = session, artifacts, lease_seconds
        self._repository, self._progress = SecureAggregationRepository(session), SecureAggregationProgress(session)

    def view(self, device_id: str, lease_id: str, known: Phase | None) -> tuple[SecureAggregationView, bool]:
        """Returns the state of the round for a device, and whether the phase is past its deadline. Changes nothing.

        Raises NotFound or Gone if the device no longer holds the lease, Conflict if the job belongs to no masked round.
        """
        job = LeaseService(self._session, self._lease_seconds).job_unlocked(device_id, lease_id)
        cohort_round = self._round(job)
        masked = self._repository.get(cohort_round.number)
        if masked is None:
            return SecureAggregationView(phase=Phase.KEYS, closes_at=cohort_round.deadline, waits=False), False
        late = not masked.phase.over and masked.closes_at is not None and masked.closes_at <= utc_now()
        return _aggregation(self._session, masked).view(device_id, known), late

    def size(self, device_id: str, lease_id: str) -> int:
        """Returns the size in bytes of a device's masked vector. Raises NotFound, Gone or Conflict."""
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.renew(lease)
        parameters = secure_aggregation_parameters(self._round(job))
        return 0 if parameters is None else vector_bytes(parameters)

    def answer(
        self, device_id: str, lease_id: str, apply: Callable[[SecureAggregationSession, str], None]
    ) -> SecureAggregationView:
        """Applies a device's message to the round of its job, and ends the phase if the message completes it.

        Raises NotFound, Gone, Conflict, and the errors of `apply`.
        """
        CohortRepository(self._session).lock_of_lease(lease_id)  # before the job, as `server.database.database` says
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.renew(lease)
        masked = self._begun(job)
        aggregation = _aggregation(self._session, masked, self._artifacts, job.number)
        before = masked.phase
        apply(aggregation, device_id)
        self._progress.tick(masked)
        return aggregation.view(device_id, before)

    def _begun(self, job: Job) -> SecureAggregationRound:
        """Returns the masked round of a job, locked. Begins it if the cohort's round is open."""
        cohort_round = self._round(job)
        masked = self._repository.locked(cohort_round.number)
        if masked is not None:
            return masked
        parameters, settings = secure_aggregation_parameters(cohort_round), cohort_round.cohort.settings
        if cohort_round.state is not RoundState.OPEN or parameters is None or settings.masking is None:
            raise LeftOutOfRound(f"round {cohort_round.position} of {cohort_round.cohort.name} has ended")
        begun = SecureAggregationRound(
            round_number=cohort_round.number,
            parameters=parameters,
            phase_seconds=settings.masking.phase_seconds,
            least=settings.quorum,
            phase=Phase.KEYS,
            closes_at=cohort_round.deadline,
        )
        self._repository.add(begun)  # only once, because the cohort is locked
        return begun

    def _round(self, job: Job) -> CohortRound:
        cohort_round = None if job.round is None else RoundRepository(self._session).of_job(job).round
        if cohort_round is None or cohort_round.cohort.settings.masking is None:
            raise Conflict("the job of this lease does not belong to a masked round")
        return cohort_round
