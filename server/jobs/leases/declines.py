"""Declined leases: a device has too little memory. The job gets a lighter estimator, waits or fails."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry
from server.database.columns import utc_now
from server.identity.devices.repository import DeviceRepository
from server.jobs.leases.repository import Ending, JobLease, LeaseRepository, MemoryDecline
from server.jobs.leases.service import LeaseService
from server.jobs.memory import predicted_peak, rough
from server.jobs.recipes import estimator_name, possible_for, scored_rows
from server.jobs.repository import Job
from server.jobs.service import JobLifecycle
from server.programs.service import ProgramRepository, ProgramService
from shared.job import JobError, JobState, Progress
from shared.protocol import Decline, LeaseState
from shared.recipe import DEFAULT_QUERIES, REVERSE_ESTIMATORS, Recipe

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
        programs = ProgramRepository(self._session)
        base = programs.base(programs.get_one(job.recipe_id))
        recipe = lighter(job, base, declined) if job.request.recipe.estimator == "auto" else None
        if recipe is not None:
            change = f"{estimator_name(job.recipe)} -> {estimator_name(recipe)}"
            self._replace(job, recipe, base, f"{reason}: {change}")
            self._show_waiting(job, f"{reason}; the estimator changes: {change}")
        elif job.only_device_id is not None:
            detail = f"{reason}; no other device may train it: use estimator auto, or submit a smaller recipe"
            error = JobError(code=DOES_NOT_FIT, detail=detail)
            self._lifecycle.move(job, JobState.FAILED, error=error)
        else:
            self._lifecycle.move(job, JobState.READY)
            self._show_waiting(job, f"{reason}; the job waits for another device")

    def _replace(self, job: Job, recipe: Recipe, base: BaseModelEntry, reason: str) -> None:
        """Makes the job wait for the program of another recipe. Its request keeps the original recipe."""
        job.estimator_reason = f"estimator {recipe.estimator}: {reason}"
        state = ProgramService(self._session).request(recipe, base)
        self._lifecycle.move(job, JobState.QUEUED, recipe=recipe, recipe_id=recipe.id)
        if state is not JobState.QUEUED:
            self._lifecycle.move(job, state)

    def _show_waiting(self, job: Job, why: str) -> None:
        self._lifecycle.progress(job, Progress(phase="waiting", steps=job.request.training.steps, why=why))


def lighter(job: Job, base: BaseModelEntry, declined: Decline) -> Recipe | None:
    """Returns the recipe nearest to a job's that fits a device, with the same batch, lengths and precision.

    The device's own count of what the program needs is corrected by the predicted difference. None: none fits.
    """
    possible, rows = possible_for(job.request).names, scored_rows(job.recipe, job.task)
    before = predicted_peak(job.recipe, base.shape, base.parameters)
    for recipe in _lighter(job.recipe):
        saved = before - predicted_peak(recipe, base.shape, base.parameters)
        fits = declined.needed_bytes - saved <= declined.available_bytes
        if fits and recipe.estimator in possible and recipe.score_rows >= rows:
            return recipe
    return None


def _lighter(recipe: Recipe) -> Iterator[Recipe]:
    """Yields a recipe with each smaller micro-batch, then without a reverse pass. Nothing if it has no reverse pass."""
    if recipe.estimator not in REVERSE_ESTIMATORS:
        return
    for rows in range(recipe.rows - 1, 0, -1):
        if recipe.effective_batch % rows == 0 and rows % recipe.rows_per_example == 0:
            yield recipe.model_copy(update={"micro_batch": rows})
    replay = {"estimator": "replay", "queries": DEFAULT_QUERIES["replay"], "optimizer": "adam", "micro_batch": None}
    if recipe.privacy == "none":
        yield recipe.model_copy(update=replay)


def _enough(lease: JobLease, declined: Decline) -> int:
    """Returns the available memory, bytes, that the device must report before it is offered the recipe again.

    This is the memory that it reported for this lease plus what it lacked. The reported memory may be larger than the
    memory in the decline, because a job's rules may keep memory free; comparing the two directly would lease the job to
    the device again at once.
    """
    reported = declined.available_bytes if lease.memory_bytes is None else lease.memory_bytes
    return min(reported + max(declined.needed_bytes - declined.available_bytes, 1), MAX_BYTES)
