"""Leasing jobs to devices: give, keep, take back, end. Knows no HTTP.

A lease that ran out is not lost at once: until its job is given to another device, its holder gets it back by asking,
or by any message about it, since it may just have been offline and has work to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.auth.service import REVOKED
from server.clock import utc_now
from server.cohorts.asking import round_task
from server.devices.repository import DeviceRepository, NonceRepository, Spent
from server.devices.rest import count_failure, forget_failure, forget_failures, resting
from server.identity import new_id
from server.jobs.lifecycle import JobLifecycle
from server.jobs.models import Job
from server.jobs.repository import JobRepository
from server.jobs.starts import StartService
from server.leases.models import Ending, JobLease
from server.leases.repository import LeaseRepository
from server.privacy.service import PrivacyService
from server.programs.repository import ProgramRepository
from server.queue.matching import Asking
from server.queue.repository import QueueRepository
from shared.errors import BudgetExceeded, Gone, MobizoError, NotFound, Replayed, StartDeleted, Unauthorized
from shared.job import JobError, JobState, Progress
from shared.program import SignedManifest
from shared.protocol import Lease, LeaseRequest, LeaseState

LEASE_ATTEMPTS = 5
LEAVE_LASTS = timedelta(seconds=20)  # that a device which stops keeps its job: long enough for its service to restart
LOST = "lost-by-devices"


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a device under a lease. spent: its signature's nonce, if it is signed."""

    device_id: str
    lease_id: str
    progress: Progress
    spent: Spent | None = None


class LeaseService:
    """Leases in one writing transaction."""

    def __init__(self, session: Session, lease_seconds: float, lease_attempts: int = LEASE_ATTEMPTS) -> None:
        """lease_seconds: of a lease that does not state its own. lease_attempts: devices that may lose one job."""
        self._session = session
        self._leases = LeaseRepository(session)
        self._jobs = JobRepository(session)
        self._programs = ProgramRepository(session)
        self._devices = DeviceRepository(session)
        self._queue = QueueRepository(session)
        self._nonces = NonceRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._starts = StartService(session)
        self._privacy = PrivacyService(session)
        self._seconds = lease_seconds
        self._attempts = lease_attempts

    def take_back_overdue(self) -> None:
        """Jobs of leases that ran out wait for a device again, unless that happened to too many of theirs."""
        now = utc_now()
        for lease in self._leases.take_overdue(now):
            job = self._jobs.by_number(lease.job_number)
            lost = self._leases.expired(job.number) + 1
            lease.ending, lease.ended_at = Ending.EXPIRED, now
            # Who is busy here at this moment is not lost; to wait for it could be to wait in a ring.
            device = self._devices.unless_busy(lease.device_id)
            if device is not None:
                count_failure(device, now)
            if lost < self._attempts:
                self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
                continue
            detail = (
                f"it was leased {lost} times, and no device was heard of again; it may be too much for them: ask for a "
                "smaller recipe, or require devices with more memory"
            )
            error = JobError(code=LOST, detail=detail)
            self._lifecycle.move(job, JobState.FAILED, attempts=job.attempts + 1, error=error)

    def asking(self, tenant: str, device_id: str, request: LeaseRequest, lock: bool = False) -> Asking:
        """A device that asks, with all that decides which jobs it may have. Raises Unauthorized if it was revoked.

        lock: keeps other requests of the device waiting until the transaction ends, so that it gets one job for both.
        """
        standing = self._leases.standing(device_id, lock)
        if standing.revoked_at is not None:
            # Its request waited for work while the operator revoked it.
            raise Unauthorized(REVOKED)
        declined = self._leases.declined(device_id, request.memory_bytes, utc_now()) if standing.has_declined else ()
        datasets = frozenset(request.datasets)
        return Asking(
            tenant,
            device_id,
            datasets,
            request.memory_bytes,
            request.capabilities,
            standing.labels,
            frozenset(declined),
            rests=resting(standing.rests_until),
            may_hold=standing.had_lease and self._leases.may_hold(device_id, datasets),
        )

    def acquire(self, asking: Asking, seconds: float | None = None) -> Lease | None:
        """A job for a device: the one it has, the one it had, or the first in the queue that it may train.

        asking: from this transaction, with the device locked.
        seconds: how long the lease is to last without a heartbeat; None: as the server is set.
        """
        lease = self._leases.live(asking.device_id, asking.datasets) if asking.may_hold else None
        if lease is None:
            self.take_back_overdue()
            lease = self._leases.lapsed(asking.device_id, asking.datasets) if asking.may_hold else None
            if lease is not None:
                self._revive(lease)
        if lease is None:
            job = self._first(asking)
            if job is None:
                return None
            lease = self._give(job, asking.device_id)
        lease.memory_bytes, lease.seconds = asking.memory_bytes, seconds
        self._extend(lease)
        return self._shown(lease)

    def _first(self, asking: Asking) -> Job | None:
        """The first job for a device that no other is taking just now."""
        for head in self._queue.heads(asking):
            job = self._queue.take(head)
            if job is not None and self._may_begin(job, asking.device_id):
                self._queue.advance(job.tenant, job.turn)
                return job
        return None

    def _may_begin(self, job: Job, device_id: str) -> bool:
        """Whether what a job goes on from is still there, and its user's privacy allows a run of it; else it fails."""
        try:
            self._starts.signed(job)
            self._privacy.begin(job, device_id)
        except (StartDeleted, BudgetExceeded) as error:
            reason = JobError(code=error.code, detail=error.detail)
            self._lifecycle.move(job, JobState.FAILED, error=reason)
            return False
        return True

    def heartbeats(self, beats: Sequence[Beat]) -> list[LeaseState | Exception]:
        """Heartbeats of several devices, each as `heartbeat` is; what is wrong with one is its answer."""
        # Kept here, so that the session has them at hand below.
        rows = self._leases.with_jobs({beat.lease_id for beat in beats})
        leases = {lease.id: lease for lease, _ in rows}
        fresh = self._nonces.spend_all({beat.spent for beat in beats if beat.spent}, utc_now())
        answers: list[LeaseState | Exception] = []
        for beat in beats:
            lease = leases.get(beat.lease_id)
            try:
                if beat.spent is not None:
                    _spend(fresh, beat.spent)
                answers.append(self._beat(lease, beat))
            except MobizoError as error:
                answers.append(error)
        return answers

    def heartbeat(self, device_id: str, lease_id: str, progress: Progress) -> LeaseState:
        """Keeps a lease and notes the progress; `stop` if the job was cancelled. Raises NotFound or Gone."""
        answer = self.heartbeats([Beat(device_id, lease_id, progress)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _beat(self, lease: JobLease | None, beat: Beat) -> LeaseState:
        if lease is None or lease.device_id != beat.device_id:
            raise _no_lease(beat.lease_id)
        if lease.ending is not Ending.CANCELLED:
            self.hold(lease)
            self._lifecycle.progress(self._jobs.by_number(lease.job_number), beat.progress)
        return self.state(lease)

    def leave(self, device_id: str, lease_id: str) -> LeaseState:
        """A device stops, perhaps to start again: the job is another's soon. Raises NotFound or Gone."""
        lease = self._find(device_id, lease_id)
        if lease.ending is not Ending.CANCELLED:
            self.hold(lease)
            lease.expires_at = min(lease.expires_at, utc_now() + LEAVE_LASTS)
        return self.state(lease)

    def fail(self, device_id: str, lease_id: str, error: JobError) -> LeaseState:
        """Ends job and lease with a reason. Raises NotFound or Gone."""
        if self._find(device_id, lease_id).ending is None:
            count_failure(self._devices.by_id(device_id), utc_now())
        return self._end(device_id, lease_id, Ending.FAILED, JobState.FAILED, error)

    def release(self, device_id: str, lease_id: str) -> LeaseState:
        """Gives the job back for any device to take. Raises NotFound or Gone."""
        return self._end(device_id, lease_id, Ending.RELEASED, JobState.READY, None)

    def find(self, device_id: str, lease_id: str) -> tuple[JobLease, Job]:
        """A lease of the device with its job. Raises NotFound."""
        lease = self._find(device_id, lease_id)
        return lease, self._jobs.by_number(lease.job_number)

    def start(self, device_id: str, lease_id: str) -> StoredVersion:
        """The version that a leased job goes on from; changes nothing. Raises NotFound, Gone or StartDeleted."""
        lease = self._leases.seen(device_id, lease_id)
        if lease is None:
            raise _no_lease(lease_id)
        self.check(lease)
        return self._starts.file(self._jobs.by_number(lease.job_number))

    def hold(self, lease: JobLease) -> None:
        """Extends a lease that is live, or lapsed but still to be had. Raises Gone otherwise."""
        self.check(lease)
        if lease.ending is not None:
            self._revive(lease)
        self._extend(lease)

    def check(self, lease: JobLease) -> None:
        """Raises Gone unless a lease is live, or lapsed but still to be had; changes nothing."""
        if lease.ending is None:
            return
        if lease.ending is Ending.EXPIRED:
            latest = self._leases.latest_of_job(lease.job_number)
            if latest is lease and self._jobs.by_number(lease.job_number).state is JobState.READY:
                return
        raise Gone(f"the lease has ended ({lease.ending}); ask for a new one")

    def end(self, lease: JobLease, ending: Ending) -> None:
        """Ends a lease; what becomes of its job is the caller's."""
        lease.ending, lease.ended_at = ending, utc_now()
        if ending is Ending.COMPLETED:
            forget_failures(self._devices.by_id(lease.device_id))

    def state(self, lease: JobLease) -> LeaseState:
        """How it stands, as the device is told."""
        job = self._jobs.by_number(lease.job_number)
        return LeaseState(job_state=job.state, expires_at=lease.expires_at, stop=job.state is JobState.CANCELLED)

    def manifest(self, job: Job) -> SignedManifest:
        """The program of a job. Raises NotFound while there is none."""
        signed = self._programs.signed(job.recipe_id)
        if signed is None:
            raise NotFound(f"the program of job {job.id} is not compiled")
        return signed

    def take_back_revoked(self, device_id: str) -> None:
        """Jobs of a revoked device wait for another; those that no other may train fail."""
        for lease in self._leases.take_live_of_device(device_id):
            job = self._jobs.by_number(lease.job_number)
            self.end(lease, Ending.REVOKED)
            self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
        for job in self._jobs.pinned(device_id):
            detail = f"device {device_id}, the only one that may train it, was revoked"
            self._lifecycle.move(job, JobState.FAILED, error=JobError(code="device-revoked", detail=detail))

    def _find(self, device_id: str, lease_id: str) -> JobLease:
        self._devices.seen(device_id, utc_now())
        lease = self._leases.of_device(device_id, lease_id)
        if lease is None:
            raise _no_lease(lease_id)
        return lease

    def _give(self, job: Job, device_id: str) -> JobLease:
        now = utc_now()
        lease = JobLease(id=new_id("lease"), job_number=job.number, device_id=device_id, created_at=now, expires_at=now)
        self._leases.add(lease)
        self._lifecycle.move(job, JobState.TRAINING, device_id=device_id, progress=None)
        return lease

    def _revive(self, lease: JobLease) -> None:
        lease.ending = lease.ended_at = None
        forget_failure(self._devices.by_id(lease.device_id))
        self._lifecycle.move(self._jobs.by_number(lease.job_number), JobState.TRAINING, device_id=lease.device_id)

    def _extend(self, lease: JobLease) -> None:
        lease.expires_at = utc_now() + timedelta(seconds=lease.seconds or self._seconds)

    def _end(
        self, device_id: str, lease_id: str, ending: Ending, state: JobState, error: JobError | None
    ) -> LeaseState:
        lease = self._find(device_id, lease_id)
        # Said twice, or about a job that was cancelled meanwhile: the answer is how it stands.
        if lease.ending not in (ending, Ending.CANCELLED):
            self.hold(lease)
            self.end(lease, ending)
            self._lifecycle.move(self._jobs.by_number(lease.job_number), state, error=error)
        return self.state(lease)

    def _shown(self, lease: JobLease) -> Lease:
        job = self._jobs.by_number(lease.job_number)
        manifest = self.manifest(job)
        try:
            start = self._starts.signed(job)
        except StartDeleted:
            # It was there when the job was given. The device reports what it lacks, unless its run is trained already.
            start = None
        return Lease(
            id=lease.id,
            job=job.view(),
            manifest=manifest,
            start=start,
            round=round_task(self._session, job),
            expires_at=lease.expires_at,
        )


def _no_lease(lease_id: str) -> NotFound:
    return NotFound(f"there is no lease {lease_id!r} of this device")


def _spend(fresh: set[tuple[str, str]], spent: Spent) -> None:
    """Raises Replayed unless the nonce is fresh, which it is for one request of a transaction."""
    key = (spent.device_id, spent.nonce)
    if key not in fresh:
        raise Replayed
    fresh.remove(key)
