"""Handles the messages of devices in masked rounds, under the leases of their jobs.

A masked round begins when the first of its devices has trained. A phase ends in the transaction of the message that
completes it. After its deadline, the next poll of a device or the periodic sweep of rounds ends it.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.federation.models import Cohort, CohortRound, secure_aggregation_parameters
from server.federation.repository import CohortRepository
from server.federation.secure_aggregation.models import SecureAggregationRound
from server.federation.secure_aggregation.progress import SecureAggregationProgress
from server.federation.secure_aggregation.repository import DatabaseStore, SecureAggregationRepository
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job
from server.storage.store import ArtifactStore
from shared.errors import Conflict, LeftOutOfRound, NotFound
from shared.federation.cohort import RoundState
from shared.federation.secure_aggregation.fixed_point import vector_bytes
from shared.federation.secure_aggregation.messages import Phase, SecureAggregationView
from shared.federation.secure_aggregation.session import SecureAggregationSession


class SecureAggregationService:
    """Handles the messages of devices in masked rounds."""

    def __init__(self, session: Session, artifacts: ArtifactStore, lease_seconds: float) -> None:
        self._session, self._artifacts, self._lease_seconds = session, artifacts, lease_seconds
        self._repository, self._progress = SecureAggregationRepository(session), SecureAggregationProgress(session)

    def view(self, device_id: str, lease_id: str, known: Phase | None) -> tuple[SecureAggregationView, bool]:
        """Returns the state of the round for a device, and whether the phase is past its deadline. Changes nothing.

        Raises NotFound or Gone if the device no longer holds the lease, Conflict if the job belongs to no masked round.
        """
        lease = LeaseRepository(self._session).get_unlocked(device_id, lease_id)
        if lease is None:
            raise NotFound(f"this device has no lease {lease_id!r}")
        LeaseService(self._session, self._lease_seconds).check(lease)
        cohort_round, _ = self._round(self._session.get_one(Job, lease.job_number))
        masked = self._repository.get(cohort_round.number)
        if masked is None:
            return SecureAggregationView(phase=Phase.KEYS, closes_at=cohort_round.deadline, waits=False), False
        late = not masked.phase.over and masked.closes_at is not None and masked.closes_at <= utc_now()
        return self._secure_aggregation(masked).view(device_id, known), late

    def size(self, device_id: str, lease_id: str) -> int:
        """Returns the size in bytes of a device's masked vector. Raises NotFound, Gone or Conflict."""
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.renew(lease)
        cohort_round, cohort = self._round(job)
        parameters = secure_aggregation_parameters(cohort, cohort_round)
        return 0 if parameters is None else vector_bytes(parameters)

    def answer(
        self, device_id: str, lease_id: str, apply: Callable[[SecureAggregationSession], None]
    ) -> SecureAggregationView:
        """Applies a device's message to the round of its job, and ends the phase if the message completes it.

        Raises NotFound, Gone, Conflict, and the errors of `apply`.
        """
        CohortRepository(self._session).lock_of_lease(lease_id)  # before the job, as `server.database.database` says
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.renew(lease)
        masked = self._begun(job)
        aggregation = self._secure_aggregation(masked, job.number)
        before = masked.phase
        apply(aggregation)
        self._progress.tick(masked)
        return aggregation.view(device_id, before)

    def _begun(self, job: Job) -> SecureAggregationRound:
        """Returns the masked round of a job, locked. Begins it if the cohort's round is open."""
        cohort_round, cohort = self._round(job)
        masked = self._repository.locked(cohort_round.number)
        if masked is not None:
            return masked
        parameters, settings = secure_aggregation_parameters(cohort, cohort_round), cohort.settings.masking
        if cohort_round.state is not RoundState.OPEN or parameters is None or settings is None:
            raise LeftOutOfRound(f"round {cohort_round.position} of {cohort.name} has ended")
        return self._repository.begin(cohort_round, parameters, settings.phase_seconds, cohort.settings.quorum)

    def _round(self, job: Job) -> tuple[CohortRound, Cohort]:
        cohort_round = self._repository.round_of(job)
        if cohort_round is None or cohort_round[1].settings.masking is None:
            raise Conflict("the job of this lease does not belong to a masked round")
        return cohort_round

    def _secure_aggregation(self, masked: SecureAggregationRound, job_number: int = 0) -> SecureAggregationSession:
        store = DatabaseStore(self._session, masked, self._artifacts, job_number)
        return SecureAggregationSession(store, masked.parameters, masked.phase_seconds, utc_now())
