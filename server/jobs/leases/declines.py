"""Declined leases: a device has too little memory, and the job shrinks, waits for another device, or fails."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import DeviceRepository
from server.jobs.leases.repository import Ending, JobLease, LeaseRepository, MemoryDecline
from server.jobs.leases.service import LeaseService
from server.jobs.memory import rough
from server.jobs.recipes import possible_for, scored_rows
from server.jobs.repository import Job
from server.jobs.service import JobLifecycle
from server.jobs.shrink import describe_changes, estimated_need, lighter, smaller
from server.programs.service import ProgramRepository, ProgramService
from shared.job import JobError, JobState, Progress
from shared.protocol import Decline, LeaseState
from shared.recipe import Recipe

DOES_NOT_FIT = "does-not-fit"
MAX_BYTES = 2**63 - 1  # of a BIGINT column


class DeclineService:
    """Declined leases in one writing transaction."""

    def __init__(self, session: Session, lease_seconds: float) -> None:
        self._session = session
        self._leases = LeaseService(session, lease_seconds)
        self._lifecycle = JobLifecycle(session)

    def decline(self, device_id: str, lease_id: str, declined: Decline) -> LeaseState:
        """Ends a lease whose program exceeds the device's memory. Raises NotFound or Gone."""
        lease, job = self._leases.find(device_id, lease_id)
        if lease.ending not in (Ending.DECLINED, Ending.CANCELLED):
            self._leases.renew(lease)
            self._leases.end(lease, Ending.DECLINED)
            self._store(lease, job, declined)
            self._resolve(job, self._reason(job, device_id, declined), declined)
        return self._leases.state(lease)

    def _store(self, lease: JobLease, job: Job, declined: Decline) -> None:
        LeaseRepository(self._session).add_decline(
            MemoryDecline(
                device_id=lease.device_id,
                recipe_id=job.recipe_id,
                job_number=job.number,
                needed_bytes=declined.needed_bytes,
                available_bytes=declined.available_bytes,
                enough_bytes=_enough(lease, declined),
                declined_at=utc_now(),
            )
        )

    def _reason(self, job: Job, device_id: str, declined: Decline) -> str:
        device = DeviceRepository(self._session).get(job.tenant, device_id)
        name = device.name if device is not None else device_id
        return (
            f"device {name} can spare {rough(declined.available_bytes):,} bytes, and the program needs "
            f"{declined.needed_bytes:,}"
        )

    def _resolve(self, job: Job, reason: str, declined: Decline) -> None:
        manifest = self._leases.manifest(job).manifest
        needed, available = declined.needed_bytes, declined.available_bytes
        rows = scored_rows(manifest.recipe, job.task)
        recipe = None
        if job.request.shrink:
            recipe = smaller(manifest, needed, available, rows)
        elif job.request.recipe.estimator == "auto":
            recipe = lighter(manifest, needed, available, possible_for(job.request).names, rows)
        if recipe is not None:
            estimate = estimated_need(manifest, recipe, needed)
            changes = describe_changes(manifest.recipe, recipe)
            self._shrink(job, recipe, f"{reason}: {changes}")
            self._show_waiting(job, f"{reason}; a smaller recipe takes about {estimate:,}: {changes}")
        elif job.only_device_id is not None:
            remedy = (
                "no smaller recipe would fit" if job.request.shrink else "allow `shrink`, or submit a smaller recipe"
            )
            error = JobError(code=DOES_NOT_FIT, detail=f"{reason}; no other device may train it: {remedy}")
            self._lifecycle.move(job, JobState.FAILED, error=error)
        else:
            self._lifecycle.move(job, JobState.READY)
            self._show_waiting(job, f"{reason}; the job waits for another device")

    def _shrink(self, job: Job, recipe: Recipe, reason: str) -> None:
        """Makes the job wait for the program of a smaller recipe. Its request keeps the original recipe."""
        before = job.recipe
        if (recipe.estimator, recipe.micro_batch) != (before.estimator, before.micro_batch):
            job.estimator_reason = f"estimator {recipe.estimator}: {reason}"
        programs = ProgramRepository(self._session)
        base = programs.base(programs.get_one(job.recipe_id))
        state = ProgramService(self._session).request(recipe, base)
        self._lifecycle.move(job, JobState.QUEUED, recipe=recipe, recipe_id=recipe.id)
        if state is not JobState.QUEUED:
            self._lifecycle.move(job, state)

    def _show_waiting(self, job: Job, why: str) -> None:
        self._lifecycle.progress(job, Progress(phase="waiting", steps=job.request.training.steps, why=why))


def _enough(lease: JobLease, declined: Decline) -> int:
    """Returns the available memory, bytes, that the device must report before it is offered the recipe again.

    This is the memory that it reported for this lease plus what it lacked. The reported memory may be larger than the
    memory in the decline, because a job's rules may keep memory free; comparing the two directly would lease the job to
    the device again at once.
    """
    reported = declined.available_bytes if lease.memory_bytes is None else lease.memory_bytes
    return min(reported + max(declined.needed_bytes - declined.available_bytes, 1), MAX_BYTES)
