"""Giving jobs to devices: one service of one writing transaction, for one device or for many together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.identity.devices.repository import BindingRepository, is_cooling_down
from server.identity.tokens import REVOKED
from server.jobs.leases.messages import JobPoll
from server.jobs.leases.repository import DeviceStatus, JobLease, LeasedJob, LeaseRepository
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import QueueRepository
from server.jobs.service import ROUND_TASK, WARM_STARTS, JobLifecycle, subscribers
from shared.errors import BudgetExceeded, StartDeleted, Unauthorized
from shared.job import JobError, JobState
from shared.protocol import Lease, ReferenceTexts
from shared.registry import SignedAdapter

MAX_LEASE_SECONDS = 3600.0  # that a device may ask for
NO_TEXTS: Mapping[str, ReferenceTexts] = MappingProxyType({})
Answer = tuple[Lease | None, DeviceOffer]  # a lease if there is a job for the device, and its current offer


class LeaseGiving:
    """Gives leases in one writing transaction. `LeaseService` keeps and ends them."""

    def __init__(
        self, session: Session, lease_seconds: float, reference_texts: Mapping[str, ReferenceTexts] = NO_TEXTS
    ) -> None:
        """lease_seconds: default duration of a lease. reference_texts: by the base's name."""
        self._session, self._reference_texts = session, reference_texts
        self._keeping = LeaseService(session, lease_seconds)
        self._leases = LeaseRepository(session)
        self._bindings = BindingRepository(session)
        self._queue = QueueRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._subscribers = subscribers(session)

    def offers(self, polls: Sequence[JobPoll], lock: bool = False) -> list[DeviceOffer | Exception]:
        """Returns the offer of each device, with everything that decides which jobs it may get.

        The answer to a device that was revoked is Unauthorized. lock: locks the devices until the transaction ends, so
        that two concurrent requests of one get the same job.
        """
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
        seconds = None if request.lease_seconds is None else min(request.lease_seconds, MAX_LEASE_SECONDS)
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
            lease_seconds=seconds,
        )

    def acquire_each(self, polls: Sequence[JobPoll]) -> list[Answer | Exception]:
        """Leases a job to each of several devices; the answer to a revoked device is its exception.

        Reads and writes for all devices together, because a lease of its own costs a dozen statements.
        """
        offers = self.offers(polls, lock=True)
        firsts: dict[str, DeviceOffer] = {}
        for offer in offers:
            if isinstance(offer, DeviceOffer):
                firsts.setdefault(offer.device_id, offer)
        leases = self._acquire(list(firsts.values()))
        answers: list[Answer | Exception] = []
        for poll, offer in zip(polls, offers, strict=True):
            if isinstance(offer, Exception):
                answers.append(offer)
            elif firsts[poll.device_id] is offer:
                answers.append((leases.get(poll.device_id), offer))
            else:
                # Of two requests of a device, the later one finds the lease that the earlier one got.
                again = self.offers([poll])[0]
                answers.append(
                    again if isinstance(again, Exception) else (self._acquire([again]).get(poll.device_id), again)
                )
        return answers

    def _acquire(self, offers: Sequence[DeviceOffer]) -> dict[str, Lease]:
        """Leases to each device the job that it has, else the one it had, else the first that it may train.

        offers: read in this transaction, of different devices, locked. Returns leases by device.
        """
        # The jobs too, which the session itself would forget.
        taken: dict[str, LeasedJob] = {}  # by device
        for offer in offers:
            if offer.may_hold and (leased := self._held(offer)) is not None:
                taken[offer.device_id] = leased
        for offer in offers:
            if offer.device_id in taken:
                lease, _ = taken[offer.device_id]
                lease.memory_bytes, lease.seconds = offer.memory_bytes, offer.lease_seconds
                self._keeping.extend(lease)
        taken |= self._grant_each([offer for offer in offers if offer.device_id not in taken])
        return {device_id: self._view(lease, job) for device_id, (lease, job) in taken.items()}

    def _held(self, offer: DeviceOffer) -> LeasedJob | None:
        """Returns the lease that a device has, or the expired one that it had, revived."""
        leased = self._leases.live(offer.device_id, offer.datasets)
        if leased is None:
            leased = self._leases.lapsed(offer.device_id, offer.datasets)
            if leased is not None:
                self._keeping.revive(leased[0])
        return leased

    def _grant_each(self, offers: Sequence[DeviceOffer]) -> dict[str, LeasedJob]:
        """Leases the next job to each device that may train one. Returns leases and jobs by device."""
        granted: dict[str, LeasedJob] = {}
        all_heads = self._queue.heads_of_each(offers)
        # A second device that would take the same job searches anew.
        jobs = self._queue.take_each([heads[0] for heads in all_heads if heads])
        start_tags: dict[str, int] = {}
        for offer, heads in zip(offers, all_heads, strict=True):
            job = jobs.pop(heads[0].job_number, None) if heads else None
            if job is not None and self._may_begin(job, offer.device_id):
                granted[offer.device_id] = self._grant(job, offer), job
                start_tags[offer.tenant] = max(job.start_tag, start_tags.get(offer.tenant, 0))
        for tenant, start_tag in start_tags.items():
            self._queue.advance(tenant, start_tag)
        # Only now, because a search finds also jobs that this transaction has locked.
        for offer, heads in zip(offers, all_heads, strict=True):
            if heads and offer.device_id not in granted and (job := self._first(offer)) is not None:
                granted[offer.device_id] = self._grant(job, offer), job
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
            reason = JobError.of(error)
            self._lifecycle.move(job, JobState.FAILED, error=reason)
            return False
        return True

    def _grant(self, job: Job, offer: DeviceOffer) -> JobLease:
        now = utc_now()
        lease = JobLease(
            id=new_id("lease"),
            job_number=job.number,
            device_id=offer.device_id,
            created_at=now,
            expires_at=now,
            memory_bytes=offer.memory_bytes,
            seconds=offer.lease_seconds,
        )
        self._keeping.extend(lease)
        self._session.add(lease)  # stored with the next statement
        self._lifecycle.move(job, JobState.TRAINING, device_id=offer.device_id, progress=None)
        return lease

    def _signed_start(self, job: Job) -> SignedAdapter | None:
        return None if job.start is None else WARM_STARTS.get()(self._session).signed(job)

    def _view(self, lease: JobLease, job: Job) -> Lease:
        manifest = self._keeping.manifest(job)
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
            starts=tuple(WARM_STARTS.get()(self._session).candidates(job, manifest.manifest)),
            round=None if job.round is None else ROUND_TASK.get()(self._session, job),
            reference_texts=self._reference_texts.get(job.recipe.base.name),
            expires_at=lease.expires_at,
        )
