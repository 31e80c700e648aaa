"""Leasing jobs to devices: give, keep, take back, end. Knows no HTTP.

A lease that ran out is not lost at once: until its job is given to another device, its holder gets it back by asking,
or by any message about it, since it may just have been offline and has work to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy.orm import Session

from server.auth.service import REVOKED
from server.clock import utc_now
from server.devices.repository import DeviceRepository
from server.identity import new_id
from server.jobs.lifecycle import JobLifecycle
from server.jobs.models import Job
from server.jobs.repository import JobRepository
from server.leases.models import Ending, JobLease
from server.leases.repository import LeaseRepository
from server.programs.repository import ProgramRepository
from shared.errors import Gone, NotFound, Unauthorized
from shared.job import JobError, JobState, Progress
from shared.program import SignedManifest
from shared.protocol import Lease, LeaseState


class LeaseService:
    """Leases in one writing transaction."""

    def __init__(self, session: Session, lease_seconds: float) -> None:
        self._leases = LeaseRepository(session)
        self._jobs = JobRepository(session)
        self._programs = ProgramRepository(session)
        self._devices = DeviceRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._duration = timedelta(seconds=lease_seconds)

    def take_back_overdue(self) -> None:
        """Jobs of leases that ran out wait for a device again."""
        now = utc_now()
        for lease in self._leases.take_overdue(now):
            job = self._jobs.by_number(lease.job_number)
            lease.ending, lease.ended_at = Ending.EXPIRED, now
            self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)

    def acquire(
        self, tenant: str, device_id: str, datasets: Sequence[str], memory_bytes: int | None = None
    ) -> Lease | None:
        """A job for a device: the one it has, the one it had, or the oldest that it may train.

        memory_bytes: what the device says it can spare.
        """
        now = utc_now()
        self._devices.seen(device_id, now)
        if self._devices.revoked(device_id):
            # Its request waited for work while the operator revoked it.
            raise Unauthorized(REVOKED)
        lease = self._leases.live(device_id, datasets)
        if lease is None:
            self.take_back_overdue()
            lease = self._leases.lapsed(device_id, datasets)
            if lease is not None:
                self._revive(lease)
        if lease is None:
            job = self._leases.waiting_job(tenant, device_id, datasets, memory_bytes, now)
            if job is None:
                return None
            lease = self._give(job, device_id)
        lease.memory_bytes = memory_bytes
        self._extend(lease)
        return self._shown(lease)

    def heartbeat(self, device_id: str, lease_id: str, progress: Progress) -> LeaseState:
        """Keeps a lease and notes the progress; `stop` if the job was cancelled. Raises NotFound or Gone."""
        lease = self._find(device_id, lease_id)
        if lease.ending is not Ending.CANCELLED:
            self.hold(lease)
            self._lifecycle.progress(self._jobs.by_number(lease.job_number), progress)
        return self.state(lease)

    def fail(self, device_id: str, lease_id: str, error: JobError) -> LeaseState:
        """Ends job and lease with a reason. Raises NotFound or Gone."""
        return self._end(device_id, lease_id, Ending.FAILED, JobState.FAILED, error)

    def release(self, device_id: str, lease_id: str) -> LeaseState:
        """Gives the job back for any device to take. Raises NotFound or Gone."""
        return self._end(device_id, lease_id, Ending.RELEASED, JobState.READY, None)

    def find(self, device_id: str, lease_id: str) -> tuple[JobLease, Job]:
        """A lease of the device with its job. Raises NotFound."""
        lease = self._find(device_id, lease_id)
        return lease, self._jobs.by_number(lease.job_number)

    def hold(self, lease: JobLease) -> None:
        """Extends a lease that is live, or lapsed but still to be had. Raises Gone otherwise."""
        if lease.ending is Ending.EXPIRED:
            latest = self._leases.latest_of_job(lease.job_number)
            if latest is lease and self._jobs.by_number(lease.job_number).state is JobState.READY:
                self._revive(lease)
        if lease.ending is not None:
            raise Gone(f"the lease has ended ({lease.ending}); ask for a new one")
        self._extend(lease)

    def end(self, lease: JobLease, ending: Ending) -> None:
        """Ends a lease; what becomes of its job is the caller's."""
        lease.ending, lease.ended_at = ending, utc_now()

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
            raise NotFound(f"there is no lease {lease_id!r} of this device")
        return lease

    def _give(self, job: Job, device_id: str) -> JobLease:
        now = utc_now()
        lease = JobLease(id=new_id("lease"), job_number=job.number, device_id=device_id, created_at=now, expires_at=now)
        self._leases.add(lease)
        self._lifecycle.move(job, JobState.TRAINING, device_id=device_id, progress=None)
        return lease

    def _revive(self, lease: JobLease) -> None:
        lease.ending = lease.ended_at = None
        self._lifecycle.move(self._jobs.by_number(lease.job_number), JobState.TRAINING, device_id=lease.device_id)

    def _extend(self, lease: JobLease) -> None:
        lease.expires_at = utc_now() + self._duration

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
        return Lease(id=lease.id, job=job.view(), manifest=self.manifest(job), expires_at=lease.expires_at)
