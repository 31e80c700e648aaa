"""Submitting, reading and cancelling jobs. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.adapters.repository import AdapterRepository
from server.artifacts.store import ArtifactStore
from server.bases.models import BaseModelEntry
from server.bases.service import BaseService
from server.calibrations.service import CalibrationService
from server.clock import utc_now
from server.cohorts.repository import CohortRepository
from server.devices.repository import DeviceRepository
from server.identity import new_id
from server.jobs.lifecycle import JobLifecycle
from server.jobs.models import Job
from server.jobs.recipes import resolve_recipe, resolve_task
from server.jobs.repository import JobRepository
from server.jobs.starts import StartService, parent_of
from server.leases.repository import LeaseRepository
from server.privacy.service import PrivacyService, settled
from server.programs.service import ProgramService
from shared.errors import Conflict, NotFound
from shared.job import JobRequest, JobState, RoundRef
from shared.recipe import BaseRef, Recipe
from shared.task import Task


@dataclass(frozen=True)
class Making:
    """What a request comes to: the base model, a whole task and recipe, the version that the run goes on from."""

    base: BaseModelEntry
    task: Task
    recipe: Recipe
    start: StoredVersion | None


class JobService:
    """Jobs in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session = session
        self._jobs = JobRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._bases = BaseService(session, artifacts)
        self._calibrations = CalibrationService(session, artifacts)

    def submit(self, tenant: str, request: JobRequest) -> Job:
        """A new job. READY at once if its recipe was compiled before.

        Raises UnknownBase, InvalidTask, InvalidRecipe, NotFound for an unknown device, Conflict if the adapter is
        another user's, BudgetExceeded, and as `StartService` does for a start that cannot be.
        """
        starts = StartService(self._session)
        request, start = starts.pin(tenant, request)
        request = settled(request)
        base = self._bases.named(request.base)
        task = resolve_task(request)
        reference = BaseRef(name=base.name, sha256=base.sha256)
        recipe = resolve_recipe(request, task, reference, base.shape, self._bases.tokenizer(base))
        self._calibrations.check(recipe, base.shape)
        if start is not None:
            starts.check(start, recipe, base.shape)
        # A later release may have another default; this job keeps what it was given.
        training = request.training.model_copy(update={"eps": request.training.eps_for(recipe)})
        request = request.model_copy(update={"training": training})
        self._check_device(tenant, request.device)
        self._check_user(tenant, request)
        return self._begin(tenant, request, Making(base, task, recipe, start))

    def submit_part(self, tenant: str, request: JobRequest, making: Making, part: RoundRef) -> Job:
        """A job for a member's part in a cohort's round, all of it resolved before.

        Raises NotFound if its device was revoked.
        """
        self._check_device(tenant, request.device)
        return self._begin(tenant, request, making, part)

    def _begin(self, tenant: str, request: JobRequest, making: Making, part: RoundRef | None = None) -> Job:
        recipe, start = making.recipe, making.start
        privacy = PrivacyService(self._session)
        privacy.admit(tenant, request)
        state = ProgramService(self._session).want(recipe, making.base, tenant)
        now = utc_now()
        job = Job(
            id=new_id("job"),
            tenant=tenant,
            state=state,
            request=request,
            task=making.task,
            recipe=recipe,
            recipe_id=recipe.id,
            adapter=request.adapter,
            user=request.user,
            dataset=request.dataset,
            priority=request.priority,
            start=None if start is None else parent_of(start),
            round=part,
            only_device_id=request.device,
            attempts=0,
            events=0,
            created_at=now,
            updated_at=now,
        )
        self._lifecycle.begin(job)
        privacy.reserve(job)
        return job

    def _check_device(self, tenant: str, device_id: str | None) -> None:
        if device_id is None:
            return
        device = DeviceRepository(self._session).get(tenant, device_id)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"device: no device {device_id!r} is enrolled here")

    def _check_user(self, tenant: str, request: JobRequest) -> None:
        """An adapter learns from one user's data only; a cohort's is made by its rounds."""
        if CohortRepository(self._session).get(tenant, request.adapter) is not None:
            raise Conflict(
                f"adapter {request.adapter!r} is a cohort's; choose another name, and name it as the job's start to go "
                "on from it"
            )
        adapter = AdapterRepository(self._session).get(tenant, request.adapter)
        owner = adapter.user if adapter is not None else None
        if owner is None or owner == request.user:
            owner = self._jobs.other_user(tenant, request.adapter, request.user)
        if owner is not None:
            raise Conflict(f"adapter {request.adapter!r} is user {owner!r}'s; choose another name")

    def get(self, tenant: str, job_id: str) -> Job:
        """A job of the tenant. Raises NotFound."""
        return _found(self._jobs.get(tenant, job_id), job_id)

    def get_locked(self, tenant: str, job_id: str) -> Job:
        """The same, and nobody else changes it until the transaction ends. Raises NotFound."""
        return _found(self._jobs.get_locked(tenant, job_id), job_id)

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Stops a job wherever it is; its device learns of it at the next heartbeat.

        Raises NotFound, or Conflict if the job has succeeded or failed.
        """
        job = self.get_locked(tenant, job_id)
        if job.state is not JobState.CANCELLED:
            self._lifecycle.move(job, JobState.CANCELLED)
            LeaseRepository(self._session).cancel(job.number, utc_now())
        return job


def _found(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise NotFound(f"there is no job {job_id!r}")
    return job
