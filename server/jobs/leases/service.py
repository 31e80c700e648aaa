"""Leasing jobs to devices: give, keep, take back, end.

A lease that ran out is not lost at once: until its job is given to another device, its holder gets it back by asking,
or by any message about it, since it may just have been offline and has work to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.identity.devices.repository import (
    BindingRepository,
    DeviceRepository,
    NonceRepository,
    SpentNonce,
    count_failure,
    forget_failure,
    forget_failures,
    is_cooling_down,
)
from server.identity.tokens import REVOKED
from server.jobs.leases.messages import JobPoll, Message, Parting, changes_nothing
from server.jobs.leases.repository import DeviceStatus, Ending, JobLease, LeaseRepository
from server.jobs.repository import Job, JobRepository
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import Head, QueueRepository
from server.jobs.service import ROUND_TASK, WARM_STARTS, JobLifecycle, subscribers
from server.settings import Settings
from shared.errors import (
    BudgetExceeded,
    DeviceNotBound,
    Gone,
    MobizoError,
    NotFound,
    ReplayedRequest,
    StartDeleted,
    Unauthorized,
)
from shared.job import OWNER_REFUSALS, JobError, JobState, Progress
from shared.program import SignedManifest
from shared.protocol import Lease, LeaseRequest, LeaseState
from shared.registry import SignedAdapter

Answer = tuple[Lease | None, DeviceOffer]  # a lease if there is a job for the device, and its current offer
LEASE_ATTEMPTS = 5
LEAVE_LASTS = timedelta(seconds=20)  # a device that stops keeps its job this long, so that its service may restart
LOST = "lost-by-devices"


class LeaseService:
    """Leases in one writing transaction."""

    def __init__(self, session: Session, lease_seconds: float, lease_attempts: int = LEASE_ATTEMPTS) -> None:
        """lease_seconds: default duration of a lease. lease_attempts: a job fails after this many expired leases."""
        self._session = session
        self._leases = LeaseRepository(session)
        self._jobs = JobRepository(session)
        self._devices = DeviceRepository(session)
        self._bindings = BindingRepository(session)
        self._queue = QueueRepository(session)
        self._nonces = NonceRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._subscribers = subscribers(session)
        self._seconds = lease_seconds
        self._attempts = lease_attempts

    def take_back_overdue(self) -> None:
        """Ends overdue leases. Their jobs wait for a device again, or fail after too many expired leases."""
        now = utc_now()
        for lease in self._leases.take_overdue(now):
            job = self._jobs.by_number(lease.job_number)
            lost = self._leases.expired(job.number) + 1
            lease.ending, lease.ended_at = Ending.EXPIRED, now
            # A device whose row is locked is active, and waiting for the lock could cause a deadlock.
            device = self._devices.unless_busy(lease.device_id)
            if device is not None:
                count_failure(device, now)
            if lost < self._attempts:
                self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
                continue
            detail = (
                f"it was leased {lost} times, and each device stopped responding; the job may exceed their memory: use "
                "a smaller recipe, or require devices with more memory"
            )
            error = JobError(code=LOST, detail=detail)
            self._lifecycle.move(job, JobState.FAILED, attempts=job.attempts + 1, error=error)

    def offer(self, tenant: str, device_id: str, request: LeaseRequest, lock: bool = False) -> DeviceOffer:
        """Returns the offer of a device, with everything that decides which jobs it may get.

        lock: locks the device until the transaction ends, so that two concurrent requests get the same job. Raises
        Unauthorized if the device was revoked.
        """
        result = self.offers([JobPoll(tenant, device_id, request)], lock)[0]
        if isinstance(result, Exception):
            raise result
        return result

    def offers(self, polls: Sequence[JobPoll], lock: bool = False) -> list[DeviceOffer | Exception]:
        """Returns the offer of each device, or the error that `offer` raises for it. lock: locks all devices."""
        device_ids = {poll.device_id for poll in polls}
        if lock:
            self._leases.lock_devices(device_ids)
        statuses, users = self._leases.statuses(device_ids), self._bindings.users_of(device_ids)
        return [self._offer(poll, statuses[poll.device_id], users[poll.device_id]) for poll in polls]

    def _offer(self, poll: JobPoll, status: DeviceStatus, users: Sequence[str]) -> DeviceOffer | Exception:
        tenant, device_id, request = poll.tenant, poll.device_id, poll.request
        if status.revoked_at is not None:
            # The device was revoked while its request waited for a job.
            return Unauthorized(REVOKED)
        declined = self._leases.declined(device_id, request.memory_bytes, utc_now()) if status.has_declined else ()
        datasets = frozenset(request.datasets)
        return DeviceOffer(
            tenant,
            device_id,
            frozenset(users),
            datasets,
            request.memory_bytes,
            request.capabilities,
            status.labels,
            frozenset(declined),
            cooling_down=is_cooling_down(status.cooldown_until),
            may_hold=status.had_lease and self._leases.may_hold(device_id, datasets),
        )

    def acquire_each(self, polls: Sequence[JobPoll]) -> list[Answer | Exception]:
        """Leases a job to each of several devices; the answer to a revoked device is its exception.

        Reads and writes for all devices together, because a lease of its own costs a dozen statements.
        """
        offers = self.offers(polls, lock=True)
        firsts: dict[str, tuple[DeviceOffer, float | None]] = {}
        for poll, offer in zip(polls, offers, strict=True):
            if isinstance(offer, DeviceOffer):
                firsts.setdefault(poll.device_id, (offer, poll.seconds))
        leases = dict(zip(firsts, self._acquire(list(firsts.values())), strict=True))
        answers: list[Answer | Exception] = []
        for poll, offer in zip(polls, offers, strict=True):
            if isinstance(offer, Exception):
                answers.append(offer)
            elif firsts[poll.device_id][0] is offer:
                answers.append((leases[poll.device_id], offer))
            else:
                # Of two requests of a device, the later one finds the lease that the earlier one got.
                again = self.offers([poll])[0]
                answers.append(again if isinstance(again, Exception) else (self.acquire(again, poll.seconds), again))
        return answers

    def acquire(self, offer: DeviceOffer, seconds: float | None = None) -> Lease | None:
        """Leases a job to a device: the one it has, else the one it had, else the first in the queue that it may train.

        offer: read in this transaction, with the device locked. seconds: duration of the lease without a heartbeat;
        None: the server's setting.
        """
        return self._acquire([(offer, seconds)])[0]

    def _acquire(self, asked: Sequence[tuple[DeviceOffer, float | None]]) -> list[Lease | None]:
        """Does what `acquire` does, for different devices."""
        # The jobs too, which the session itself would forget.
        taken: dict[str, tuple[JobLease, Job]] = {}  # by device
        held = [(offer, seconds) for offer, seconds in asked if offer.may_hold]
        for offer, _ in held:
            lease = self._leases.live(offer.device_id, offer.datasets)
            if lease is not None:
                taken[offer.device_id] = lease, self._jobs.by_number(lease.job_number)
        if len(taken) < len(asked):
            self.take_back_overdue()
        for offer, _ in held:
            if offer.device_id in taken:
                continue
            lease = self._leases.lapsed(offer.device_id, offer.datasets)
            if lease is not None:
                self._revive(lease)
                taken[offer.device_id] = lease, self._jobs.by_number(lease.job_number)
        for offer, seconds in held:
            if offer.device_id in taken:
                lease, _ = taken[offer.device_id]
                lease.memory_bytes, lease.seconds = offer.memory_bytes, seconds
                self._extend(lease)
        taken |= self._grant_each([pair for pair in asked if pair[0].device_id not in taken])
        return [self._view(*taken[offer.device_id]) if offer.device_id in taken else None for offer, _ in asked]

    def _grant_each(self, asked: Sequence[tuple[DeviceOffer, float | None]]) -> dict[str, tuple[JobLease, Job]]:
        """Leases the next job to each device that may train one. Returns leases and jobs by device."""
        granted: dict[str, tuple[JobLease, Job]] = {}
        all_heads = self._queue.heads_of_each([offer for offer, _ in asked])
        choices: dict[int, Head] = {}  # by job; a second device that would take the same one searches anew
        for heads in all_heads:
            for head in heads[:1]:
                choices.setdefault(head.job_number, head)
        jobs = self._queue.take_each(list(choices.values()))
        start_tags: dict[str, int] = {}
        for (offer, seconds), heads in zip(asked, all_heads, strict=True):
            job = jobs.pop(heads[0].job_number, None) if heads else None
            if job is not None and self._may_begin(job, offer.device_id):
                granted[offer.device_id] = self._grant(job, offer, seconds), job
                start_tags[offer.tenant] = max(job.start_tag, start_tags.get(offer.tenant, 0))
        for tenant, start_tag in start_tags.items():
            self._queue.advance(tenant, start_tag)
        # Only now, because a search finds also jobs that this transaction has locked.
        for (offer, seconds), heads in zip(asked, all_heads, strict=True):
            if heads and offer.device_id not in granted and (job := self._first(offer)) is not None:
                granted[offer.device_id] = self._grant(job, offer, seconds), job
        return granted

    def _first(self, offer: DeviceOffer) -> Job | None:
        """Takes the first job for a device that no other transaction has locked."""
        for head in self._queue.heads(offer):
            job = self._queue.take(head)
            if job is not None and self._may_begin(job, offer.device_id):
                self._queue.advance(job.tenant, job.start_tag)
                return job
        return None

    def _may_begin(self, job: Job, device_id: str) -> bool:
        """Returns whether a job may begin; it fails if its start was deleted or its user's privacy budget is spent."""
        try:
            self._signed_start(job)
            for subscriber in self._subscribers:
                subscriber.begin(job, device_id)
        except (StartDeleted, BudgetExceeded) as error:
            reason = JobError(code=error.code, detail=error.detail)
            self._lifecycle.move(job, JobState.FAILED, error=reason)
            return False
        return True

    def messages(self, messages: Sequence[Message]) -> list[LeaseState | Exception]:
        """Processes messages of several devices; the answer to one that is refused is its exception.

        Raises an error that comes after changes: the caller rolls back, and processes each message by itself.
        """
        # Devices are locked before jobs. A heartbeat locks none; `Presences` writes when its device was seen.
        leaving = {message.device_id for message in messages if not isinstance(message.says, Progress)}
        if leaving:
            self._leases.lock_devices(leaving)
            self._devices.all_seen(leaving, utc_now())
        ending = any(isinstance(message.says, JobError) or message.says is Parting.RELEASE for message in messages)
        # This variable keeps the jobs in the session, whose identity map is weak.
        rows = self._leases.with_jobs({message.lease_id for message in messages}, whole=ending)
        leases = {lease.id: lease for lease, _ in rows}
        fresh_nonces = self._nonces.spend_all({message.nonce for message in messages if message.nonce}, utc_now())
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

    def heartbeat(self, device_id: str, lease_id: str, progress: Progress) -> LeaseState:
        """Extends a lease and stores the progress; `stop` if the job was cancelled. Raises NotFound or Gone."""
        return self._process(Message(device_id, lease_id, progress))

    def leave(self, device_id: str, lease_id: str) -> LeaseState:
        """Shortens the lease of a device that stops; it keeps the job if it restarts soon. Raises NotFound or Gone."""
        return self._process(Message(device_id, lease_id, Parting.LEAVE))

    def fail(self, device_id: str, lease_id: str, error: JobError) -> LeaseState:
        """Ends a job and its lease with an error, which counts as a failure of the device unless its owner refused.

        Raises NotFound or Gone.
        """
        return self._process(Message(device_id, lease_id, error))

    def release(self, device_id: str, lease_id: str) -> LeaseState:
        """Returns the job to the queue. Raises NotFound or Gone."""
        return self._process(Message(device_id, lease_id, Parting.RELEASE))

    def _process(self, message: Message) -> LeaseState:
        answer = self.messages([message])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _checked(self, message: Message, lease: JobLease | None, fresh_nonces: set[tuple[str, str]]) -> JobLease:
        """Returns the lease of a message. Raises ReplayedRequest, NotFound or Gone; changes nothing."""
        if message.nonce is not None:
            _spend(fresh_nonces, message.nonce)
        if lease is None or lease.device_id != message.device_id:
            raise _no_lease(message.lease_id)
        if not changes_nothing(message, lease):
            self.check(lease)
        return lease

    def _apply(self, lease: JobLease, says: Progress | JobError | Parting) -> None:
        if isinstance(says, JobError) and lease.ending is None and says.code not in OWNER_REFUSALS:
            count_failure(self._devices.by_id(lease.device_id), utc_now())
        self.renew(lease)
        job = self._jobs.by_number(lease.job_number)
        if isinstance(says, Progress):
            self._lifecycle.progress(job, says)
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
        lease = self._find(device_id, lease_id)
        return lease, self._jobs.by_number(lease.job_number)

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
            self._revive(lease)
        self._extend(lease)

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
            forget_failures(self._devices.by_id(lease.device_id))

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

    def take_back_revoked(self, device_id: str) -> None:
        """Returns the jobs of a revoked device to the queue; those that no other device may train fail."""
        for lease in self._leases.take_live_of_device(device_id):
            job = self._jobs.by_number(lease.job_number)
            self.end(lease, Ending.REVOKED)
            self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
        for job in self._jobs.pinned(device_id):
            detail = f"device {device_id}, the only one that may train it, was revoked"
            self._lifecycle.move(job, JobState.FAILED, error=JobError(code="device-revoked", detail=detail))

    def take_back_unbound(self, device_id: str, user: str) -> None:
        """Returns a user's jobs of a device to the queue; those that no other device may train fail.

        Also ends expired leases, so that the device cannot revive them. The device's row is locked.
        """
        for lease in self._leases.take_of_user(device_id, user):
            job = self._jobs.by_number(lease.job_number)
            live = lease.ending is None
            self.end(lease, Ending.UNBOUND)
            if live:
                self._lifecycle.move(job, JobState.READY, attempts=job.attempts + 1)
        for job in self._jobs.pinned_of(device_id, user):
            detail = f"user {user!r} was unbound from device {device_id}, the only one that may train it"
            self._lifecycle.move(job, JobState.FAILED, error=JobError(code=DeviceNotBound.code, detail=detail))

    def _find(self, device_id: str, lease_id: str) -> JobLease:
        self._devices.record_presence(device_id, utc_now())
        lease = self._leases.of_device(device_id, lease_id)
        if lease is None:
            raise _no_lease(lease_id)
        return lease

    def _grant(self, job: Job, offer: DeviceOffer, seconds: float | None) -> JobLease:
        now = utc_now()
        lease = JobLease(
            id=new_id("lease"),
            job_number=job.number,
            device_id=offer.device_id,
            created_at=now,
            expires_at=now,
            memory_bytes=offer.memory_bytes,
            seconds=seconds,
        )
        self._extend(lease)
        self._leases.add(lease)
        self._lifecycle.move(job, JobState.TRAINING, device_id=offer.device_id, progress=None)
        return lease

    def _revive(self, lease: JobLease) -> None:
        lease.ending = lease.ended_at = None
        forget_failure(self._devices.by_id(lease.device_id))
        self._lifecycle.move(self._jobs.by_number(lease.job_number), JobState.TRAINING, device_id=lease.device_id)

    def _extend(self, lease: JobLease) -> None:
        lease.expires_at = utc_now() + timedelta(seconds=lease.seconds or self._seconds)

    def _signed_start(self, job: Job) -> SignedAdapter | None:
        return None if job.start is None else WARM_STARTS.get()(self._session).signed(job)

    def _view(self, lease: JobLease, job: Job) -> Lease:
        manifest = self.manifest(job)
        try:
            start = self._signed_start(job)
        except StartDeleted:
            # Deleted after the job was leased. The device reports this, unless it has finished training.
            start = None
        return Lease(
            id=lease.id,
            job=job.view(),
            manifest=manifest,
            start=start,
            round=None if job.round is None else ROUND_TASK.get()(self._session, job),
            expires_at=lease.expires_at,
        )


def take_back_revoked(session: Session, settings: Settings, device_id: str) -> None:
    """Returns the jobs of a revoked device to the queue (`LeaseService.take_back_revoked`)."""
    LeaseService(session, settings.lease_seconds).take_back_revoked(device_id)


def take_back_unbound(session: Session, settings: Settings, device_id: str, user: str) -> None:
    """Returns a user's jobs of a device to the queue (`LeaseService.take_back_unbound`)."""
    LeaseService(session, settings.lease_seconds).take_back_unbound(device_id, user)


def _no_lease(lease_id: str) -> NotFound:
    return NotFound(f"there is no lease {lease_id!r} of this device")


def _spend(fresh_nonces: set[tuple[str, str]], nonce: SpentNonce) -> None:
    """Raises ReplayedRequest unless the nonce is fresh. Each nonce counts for one request of a transaction."""
    key = (nonce.device_id, nonce.nonce)
    if key not in fresh_nonces:
        raise ReplayedRequest
    fresh_nonces.remove(key)
