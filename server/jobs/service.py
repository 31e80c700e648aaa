"""Submitting, reading and cancelling jobs."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry, BaseService
from server.catalog.calibrations.service import CalibrationService
from server.clock import utc_now
from server.database.columns import new_id
from server.identity.devices.bindings import BindingService
from server.identity.devices.repository import DeviceRepository
from server.jobs.leases.repository import LeaseRepository
from server.jobs.lifecycle import WARM_STARTS, JobLifecycle, subscribers
from server.jobs.recipes import RecipeBase, choose_recipe, resolve_task, spare_memory
from server.jobs.repository import Job, JobRepository, StateTimes
from server.programs.service import ProgramService
from server.storage.store import ArtifactStore
from shared.errors import Conflict, NotFound
from shared.job import JobRequest, JobState, RoundRef
from shared.recipe import BaseRef, Recipe
from shared.registry import Parent
from shared.task import Task


@dataclass(frozen=True)
class ResolvedJob:
    """A resolved request: the base model, the complete task and recipe, and the version that the run continues.

    start_user: whose version it is, if another user's than the job's. quiet: no figures of the data are stored.
    estimator_reason: why the recipe has its estimator; None if the request names it.
    """

    base: BaseModelEntry
    task: Task
    recipe: Recipe
    start: Parent | None
    start_user: str | None = None
    quiet: bool = False
    estimator_reason: str | None = None


class JobService:
    """Jobs in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._jobs = JobRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._subscribers = subscribers(session)
        self._bases = BaseService(session, artifacts)

    def submit(self, tenant: str, request: JobRequest) -> Job:
        """Creates a job, which is READY at once if its recipe was compiled before.

        Raises UnknownBase, InvalidTask, InvalidRecipe, NotFound for an unknown device, DeviceNotBound for one that does
        not train for the user, Conflict if the adapter belongs to another user, BudgetExceeded, and the errors of
        `WarmStarts` for an invalid start.
        """
        start = None
        if request.start is not None:
            request, start = WARM_STARTS.get()(self._session).pin(tenant, request, request.start)
        for subscriber in self._subscribers:
            request = subscriber.settle(request)
        base = self._bases.named(request.base)
        task = resolve_task(request)
        start_user = None if start is None or start.user == request.user else start.user
        self._check_device(tenant, request, start_user)
        spare = spare_memory(self._session, tenant, request) if request.recipe.estimator == "auto" else None
        reference = BaseRef(name=base.name, sha256=base.sha256)
        of_base = RecipeBase(reference, base.shape, base.parameters, self._bases.tokenizer(base))
        chosen = choose_recipe(request, task, of_base, spare)
        recipe = chosen.recipe
        if recipe.calibration is not None:
            CalibrationService(self._session, self._artifacts).check(recipe, base.shape)
        if start is not None:
            start.check(recipe, base.shape)
        # Stored explicitly, because a later release may have another default.
        training = request.training.model_copy(update={"eps": request.training.eps_for(recipe)})
        request = request.model_copy(update={"training": training})
        parent = None if start is None else start.parent
        self._check_user(tenant, request)
        resolved = ResolvedJob(base, task, recipe, parent, start_user, estimator_reason=chosen.reason)
        return self._begin(tenant, request, resolved)

    def submit_part(self, tenant: str, request: JobRequest, resolved: ResolvedJob, part: RoundRef) -> Job:
        """Creates a resolved job for a member's part in a cohort's round.

        Raises NotFound if its device was revoked, DeviceNotBound if the member was unbound from it.
        """
        self._check_device(tenant, request, None)
        return self._begin(tenant, request, resolved, part)

    def _begin(self, tenant: str, request: JobRequest, resolved: ResolvedJob, part: RoundRef | None = None) -> Job:
        recipe = resolved.recipe
        for subscriber in self._subscribers:
            subscriber.admit(tenant, request)
        state = ProgramService(self._session).request(recipe, resolved.base)
        now = utc_now()
        job = Job(
            id=new_id("job"),
            tenant=tenant,
            state=state,
            request=request,
            task=resolved.task,
            recipe=recipe,
            recipe_id=recipe.id,
            estimator_reason=resolved.estimator_reason,
            adapter=request.adapter,
            user=request.user,
            dataset=request.dataset,
            priority=request.priority,
            start=resolved.start,
            start_user=resolved.start_user,
            round=part,
            quiet=resolved.quiet,
            only_device_id=request.device,
            attempts=0,
            events=0,
            times=StateTimes(since=now),
            created_at=now,
            updated_at=now,
        )
        self._lifecycle.begin(job)
        for subscriber in self._subscribers:
            subscriber.created(job)
        return job

    def _check_device(self, tenant: str, request: JobRequest, start_user: str | None) -> None:
        """Raises NotFound or DeviceNotBound unless the device that a request names may train it."""
        if request.device is None:
            return
        device = DeviceRepository(self._session).get(tenant, request.device)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"device: no device {request.device!r} is enrolled here")
        users = (request.user,) if start_user is None else (request.user, start_user)
        BindingService(self._session).check(device.id, *users)

    def _check_user(self, tenant: str, request: JobRequest) -> None:
        """Raises Conflict unless the adapter is the user's, because an adapter learns from one user's data."""
        for subscriber in self._subscribers:
            subscriber.check_adapter(tenant, request)
        owner = self._jobs.other_user(tenant, request.adapter, request.user)
        if owner is not None:
            raise Conflict(f"adapter {request.adapter!r} is user {owner!r}'s; choose another name")

    def get(self, tenant: str, job_id: str) -> Job:
        """Returns a job of the tenant. Raises NotFound."""
        return _existing(self._jobs.get(tenant, job_id), job_id)

    def get_locked(self, tenant: str, job_id: str) -> Job:
        """Returns a job of the tenant, locked until the transaction ends. Raises NotFound."""
        return _existing(self._jobs.get_locked(tenant, job_id), job_id)

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Cancels a job; its device learns of it at the next heartbeat.

        Raises NotFound, or Conflict if the job has succeeded or failed.
        """
        job = self.get_locked(tenant, job_id)
        if job.state is not JobState.CANCELLED:
            self._lifecycle.move(job, JobState.CANCELLED)
            LeaseRepository(self._session).cancel(job.number, utc_now())
        return job


def _existing(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise NotFound(f"there is no job {job_id!r}")
    return job
