"""Masked rounds in one transaction: what devices say under their leases, and what the cohort's round sees of it.

A masked round begins when the first of its devices has trained. It ends a phase in the transaction of the answer that
completes it; what ends by its deadline is ended by whoever looks first, a device or the worker that minds rounds. Knows
no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from server.artifacts.store import ArtifactStore
from server.clock import utc_now
from server.cohorts.models import Cohort, CohortRound
from server.cohorts.repository import CohortRepository
from server.jobs.models import Job
from server.leases.repository import LeaseRepository
from server.leases.service import LeaseService
from server.masking.models import MaskedRound
from server.masking.parameters import masking_parameters
from server.masking.progress import MaskingProgress
from server.masking.repository import DatabaseStore, MaskingRepository
from shared.cohort import RoundState
from shared.errors import Conflict, MaskingOut, NotFound
from shared.masking.fixed_point import vector_bytes
from shared.masking.messages import MaskingView, Phase
from shared.masking.session import MaskingSession


class MaskingService:
    """Devices' parts in masked rounds."""

    def __init__(self, session: Session, artifacts: ArtifactStore, lease_seconds: float) -> None:
        self._session, self._artifacts, self._lease_seconds = session, artifacts, lease_seconds
        self._repository, self._progress = MaskingRepository(session), MaskingProgress(session)

    def view(self, device_id: str, lease_id: str, known: Phase | None) -> tuple[MaskingView, bool]:
        """How the round stands for a device, changing nothing; and whether a phase's time is over.

        Raises NotFound or Gone for a lease that is not the device's any more, Conflict for a job of no masked round.
        """
        lease = LeaseRepository(self._session).seen(device_id, lease_id)
        if lease is None:
            raise NotFound(f"there is no lease {lease_id!r} of this device")
        LeaseService(self._session, self._lease_seconds).check(lease)
        found, _ = self._round(self._session.get_one(Job, lease.job_number))
        masked = self._repository.get(found.number)
        if masked is None:
            return MaskingView(phase=Phase.KEYS, closes_at=found.deadline, waits=False), False
        late = not masked.phase.over and masked.closes_at is not None and masked.closes_at <= utc_now()
        return self._masking(masked).view(device_id, known), late

    def size(self, device_id: str, lease_id: str) -> int:
        """Bytes of the vector that a device may send. Raises NotFound, Gone or Conflict."""
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.hold(lease)
        found, cohort = self._round(job)
        parameters = masking_parameters(cohort, found)
        return 0 if parameters is None else vector_bytes(parameters)

    def answer(self, device_id: str, lease_id: str, say: Callable[[MaskingSession], None]) -> MaskingView:
        """Lets a device say something in the round of its job, and ends the phase if that was all it waited for.

        Raises NotFound, Gone, Conflict, and what `say` raises.
        """
        CohortRepository(self._session).lock_of_lease(lease_id)  # before the job, as `server.db.locking` says
        leases = LeaseService(self._session, self._lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        leases.hold(lease)
        masked = self._begun(job)
        masking = self._masking(masked, job.number)
        before = masked.phase
        say(masking)
        self._progress.tick(masked)
        return masking.view(device_id, before)

    def _begun(self, job: Job) -> MaskedRound:
        """The masked round of a job, locked; begun if it was not and may be."""
        found, cohort = self._round(job)
        masked = self._repository.locked(found.number)
        if masked is not None:
            return masked
        parameters, settings = masking_parameters(cohort, found), cohort.settings.masking
        if found.state is not RoundState.OPEN or parameters is None or settings is None:
            raise MaskingOut(f"round {found.position} of {cohort.name} has ended")
        return self._repository.begin(found, parameters, settings.phase_seconds, cohort.settings.quorum)

    def _round(self, job: Job) -> tuple[CohortRound, Cohort]:
        found = self._repository.round_of(job)
        if found is None or found[1].settings.masking is None:
            raise Conflict("this lease's job belongs to no masked round")
        return found

    def _masking(self, masked: MaskedRound, job_number: int = 0) -> MaskingSession:
        store = DatabaseStore(self._session, masked, self._artifacts, job_number)
        return MaskingSession(store, masked.parameters, masked.phase_seconds, utc_now())
