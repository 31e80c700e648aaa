"""Leases after they were given: keep, take back, end.

A lease that ran out is not lost at once: until its job is given to another device, its holder gets it back by asking,
or by any message about it, since it may just have been offline and has work to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import (
    DeviceRepository,
    NonceRepository,
    SpentNonce,
    count_failure,
    forget_failure,
)
from server.jobs.leases.messages import Message, Parting, Report, changes_nothing
from server.jobs.leases.repository import Ending, JobLease, LeaseRepository
from server.jobs.repository import Job, JobRepository
from server.jobs.service import JobLifecycle
from shared.errors import DeviceNotBound, Gone, MobizoError, NotFound, ReplayedRequest
from shared.job import OWNER_REFUSALS, TOO_FEW_NEW_RECORDS, JobError, JobState, Progress
from shared.program import SignedManifest
from shared.protocol import ChosenStart, LeaseState

LEASE_ATTEMPTS = 5  # leases of one job that may expire before the job fails
LEAVE_LASTS = timedelta(seconds=20)  # a device that stops keeps its job this long, so that its service may restart
LOST = "lost-by-devices"
REFUSALS = OWNER_REFUSALS | {TOO_FEW_NEW_RECORDS}  # by which no device fails


class LeaseService:
    """Leases in one writing transaction."""

    def __init__(self, session: Session, lease_seconds: float) -> None:
        """lease_seconds: default duration of a lease."""
        self._leases = LeaseRepository(session)
        self._jobs = JobRepository(session)
        self._devices = DeviceRepository(session)
        self._nonces = NonceRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._seconds = lease_seconds

    def messages(self, messages: Sequence[Message]) -> list[LeaseState | Exception]:
        """Processes messages of several devices; the answer to one that is refused is its exception.

        Raises an error that comes after changes: the caller rolls back, and processes each message by itself.
        """
        # Devices are locked before jobs. A heartbeat locks none; `Presences` writes when its device was seen.
        leaving = {message.device_id for message in messages if not isinstance(message.says, Progress)}
        if leaving:
            self._leases.lock_devices(leaving)
            self._devices.record_presences(dict.fromkeys(leaving), utc_now())
        ending = any(isinstance(message.says, JobError) or message.says is Parting.RELEASE for message in messages)
        # This variable keeps the jobs in the session, whose identity map is weak.
        rows = self._leases.with_jobs({message.lease_id for message in messages}, whole=ending)
        leases = {lease.id: lease for lease, _ in rows}
        fresh_nonces = self._nonces.spend_all({message.nonce for message in messages if message.nonce})
        states: list[LeaseState | Exception] = []
        for message in messages:
            try:
                lease = self._checked(message, leases.get(message.lease_id), fresh_nonces)
            except MobizoError as error:
                states.append(error)
                continue
            if not changes_nothing(message, lease):
                self._apply(lease, message.says)
            states.append(self.state(lease))
        return states

    def _checked(self, message: Message, lease: JobLease | None, fresh_nonces: set[tuple[str, str]]) -> JobLease:
        """Returns the lease of a message. Raises ReplayedRequest, NotFound or Gone; changes nothing."""
        if message.nonce is not None:
            _spend(fresh_nonces, message.nonce)
        if lease is None or lease.device_id != message.device_id:
            raise _no_lease(message.lease_id)
        if not changes_nothing(message, lease):
            self.check(lease)
        return lease

    def _apply(self, lease: JobLease, says: Report) -> None:
        if isinstance(says, JobError) and lease.ending is None and says.code not in REFUSALS:
            count_failure(self._devices.by_id(lease.device_id), utc_now())
        self.renew(lease)
        job = self._jobs.by_number(lease.job_number)
        if isinstance(says, Progress):
            self._lifecycle.progress(job, says)
        elif isinstance(says, ChosenStart):
            self._lifecycle.choose_start(job, self.manifest(job).manifest, says.start)
        elif says is Parting.LEAVE:
            lease.expires_at = min(lease.expires_at, utc_now() + LEAVE_LASTS)
        elif isinstance(says, JobError):
            self.end(lease, Ending.FAILED)
            self._lifecycle.move(job, JobState.FAILED, error=says)
        else:
            self.end(lease, Ending.RELEASED)
            self._lifecycle.move(job, JobState.READY, error=None)

    def find(self, device_id: str, lease_id: str) -> tuple[JobLease, Job]:
        """Returns a lease of the device with its job, locked. Raises NotFound."""
        self._devices.record_presences({device_id: None}, utc_now())
        leased = self._leases.of_device(device_id, lease_id)
        if leased is None:
            raise _no_lease(lease_id)
        return leased

    def job_unlocked(self, device_id: str, lease_id: str) -> Job:
        """Returns the job of a lease that `check` accepts, without locking it. Raises NotFound or Gone."""
        lease = self._leases.get_unlocked(device_id, lease_id)
        if lease is None:
            raise _no_lease(lease_id)
        self.check(lease)
        return self._jobs.by_number(lease.job_number)

    def renew(self, lease: JobLease) -> None:
        """Extends a live lease, or revives an expired one whose job still waits. Raises Gone otherwise."""
        self.check(lease)
        if lease.ending is not None:
            self.revive(lease)
        self.extend(lease)

    def revive(self, lease: JobLease) -> None:
        """Makes an expired lease a live one, and its job one in training."""
        lease.ending = lease.ended_at = None
        # Devices are locked before jobs, and the job is locked already. One whose row is locked keeps its failure.
        device = self._devices.unless_busy(lease.device_id)
        if device is not None:
            forget_failure(device)
        self._lifecycle.move(self._jobs.by_number(lease.job_number), JobState.TRAINING, device_id=lease.device_id)

    def extend(self, lease: JobLease) -> None:
        """Sets when a lease expires, from now on."""
        lease.expires_at = utc_now() + timedelta(seconds=lease.seconds or self._seconds)

    def check(self, lease: JobLease) -> None:
        """Raises Gone unless a lease is live, or expired while its job still waits; changes nothing."""
        if lease.ending is None:
            return
        if lease.ending is Ending.EXPIRED:
            latest = self._leases.latest_of_job(lease.job_number)
            if latest is lease and self._jobs.by_number(lease.job_number).state is JobState.READY:
                return
        raise Gone(f"the lease has ended ({lease.ending}); ask for a new one")

    def end(self, lease: JobLease, ending: Ending) -> None:
        """Ends a lease. The caller moves its job."""
        lease.ending, lease.ended_at = ending, utc_now()
        if ending is Ending.COMPLETED:
            self._devices.forget_failures(lease.device_id)

    def state(self, lease: JobLease) -> LeaseState:
        """Returns the state of a lease as the device sees it."""
        job = self._jobs.by_number(lease.job_number)
        return LeaseState(job_state=job.state, expires_at=lease.expires_at, stop=job.state is JobState.CANCELLED)

    def manifest(self, job: Job) -> SignedManifest:
        """Returns the signed program of a job. Raises NotFound before it is compiled."""
        signed = self._lifecycle.signed_program(job)
        if signed is None:
            raise NotFound(f"the program of job {job.id} is not compiled")
        return signed


def take_back_overdue(session: Session) -> None:
    """Ends overdue leases. Their jobs wait for a device again, or fail after too many expired leases."""
    leases, lifecycle, now = LeaseRepository(session), JobLifecycle(session), utc_now()
    for lease, job in leases.take_overdue(now):
        lost = leases.expired(job.number) + 1
        lease.ending, lease.ended_at = Ending.EXPIRED, now
        # A device whose row is locked is active, and waiting for the lock could cause a deadlock.
        device = DeviceRepository(session).unless_busy(lease.device_id)
        if device is not None:
            count_failure(device, now)
        if lost < LEASE_ATTEMPTS:
            lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
            continue
        detail = (
            f"it was leased {lost} times, and each device stopped responding; the job may exceed their memory: use "
            "a smaller recipe, or require devices with more memory"
        )
        lifecycle.move(job, JobState.FAILED, attempts=job.attempts + 1, error=JobError(code=LOST, detail=detail))


def take_back_revoked(session: Session, device_id: str) -> None:
    """Returns the jobs of a revoked device to the queue; those that no other device may train fail."""
    lifecycle = JobLifecycle(session)
    for lease, job in LeaseRepository(session).take_live_of_device(device_id):
        lease.ending, lease.ended_at = Ending.REVOKED, utc_now()
        lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
    for job in JobRepository(session).pinned(device_id):
        detail = f"device {device_id}, the only one that may train it, was revoked"
        lifecycle.move(job, JobState.FAILED, error=JobError(code="device-revoked", detail=detail))


def take_back_unbound(session: Session, device_id: str, user: str) -> None:
    """Returns a user's jobs of a device to the queue; those that no other device may train fail.

    Also ends expired leases, so that the device cannot revive them. The device's row is locked.
    """
    lifecycle = JobLifecycle(session)
    for lease, job in LeaseRepository(session).take_of_user(device_id, user):
        live = lease.ending is None
        lease.ending, lease.ended_at = Ending.UNBOUND, utc_now()
        if live:
            lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
    for job in JobRepository(session).pinned_of(device_id, user):
        detail = f"user {user!r} was unbound from device {device_id}, the only one that may train it"
        lifecycle.move(job, JobState.FAILED, error=JobError(code=DeviceNotBound.code, detail=detail))


def _no_lease(lease_id: str) -> NotFound:
    return NotFound(f"there is no lease {lease_id!r} of this device")


def _spend(fresh_nonces: set[tuple[str, str]], nonce: SpentNonce) -> None:
    """Raises ReplayedRequest unless the nonce is fresh. Each nonce counts for one request of a transaction."""
    key = (nonce.device_id, nonce.nonce)
    if key not in fresh_nonces:
        raise ReplayedRequest
    fresh_nonces.remove(key)
