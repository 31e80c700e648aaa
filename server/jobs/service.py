"""Submitting, reading and cancelling jobs, and every change of a job along its state machine, with its event.

A job that becomes ready joins a lane of the queue here, and leaves it when it changes state again. Also the ports by
which jobs reach the registry and federation, which lie above them; `server.wiring` connects these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry, BaseService
from server.catalog.calibrations.service import CalibrationService
from server.database.columns import new_id, utc_now
from server.database.database import Database, change_state, lock_name
from server.identity.devices.service import BindingService
from server.identity.quotas import Quota, QuotaService
from server.jobs.leases.repository import LeaseRepository
from server.jobs.recipes import choose_recipe, resolve_task, spare_memory
from server.jobs.repository import AWAITING_PROGRAM, JOB_EVENT, PROGRESS_EVENT, Job, JobRepository, StateTimes
from server.jobs.scheduling.matching import needs_of
from server.jobs.scheduling.repository import QueueRepository, mark_ready
from server.ports import Port
from server.programs.service import COMPILE, JOB_STATES, Program, ProgramRepository, ProgramService, ProgramState
from server.storage.store import ArtifactStore
from server.tasks.requests import request_task
from shared.errors import AdapterNotFound, Conflict, RevisionNotFound
from shared.federation.cohort import RoundTask
from shared.federation.secure_aggregation.redaction import redacted_progress, redacted_result
from shared.job import OWNER_REFUSALS, TRANSITIONS, JobRequest, JobStart, JobState, Progress, RoundRef
from shared.program import ProgramManifest, SignedManifest
from shared.recipe import Recipe
from shared.registry import Parent, SignedAdapter
from shared.task import Task
from shared.zo.lora import BaseShape

CANCELLED = "it was cancelled"  # why a series ended
DAY = timedelta(days=1)


class PinnedStart(Protocol):
    """The adapter version that a new job starts from."""

    @property
    def parent(self) -> Parent:
        """Returns the version as the lineage of the result names it."""

    @property
    def user(self) -> str | None:
        """The user whose adapter it is; None for a cohort's adapter."""

    def check(self, recipe: Recipe, shape: BaseShape) -> None:
        """Raises StartMismatch unless a program of `recipe` can go on from the version's B."""


class WarmStarts(Protocol):
    """The adapter versions that jobs go on from, in one transaction."""

    def pin(self, tenant: str, request: JobRequest, start: JobStart) -> tuple[JobRequest, PinnedStart]:
        """Returns the request with its start pinned to one version, and that version.

        Raises AdapterNotFound, RevisionNotFound, VersionHeld or Unavailable.
        """

    def signed(self, job: Job) -> SignedAdapter:
        """Returns the signed start of a job that has one. Raises StartDeleted."""

    def candidates(self, job: Job, program: ProgramManifest) -> Sequence[SignedAdapter]:
        """Returns the versions among which the device of a job with start `auto` chooses; none for other jobs."""

    def choose(self, job: Job, program: ProgramManifest, chosen: JobStart | None) -> None:
        """Pins the start of a job with start `auto` to a candidate; None: B = 0.

        Raises NotFound if it is not a candidate, Conflict if the job has another start.
        """


class JobSubscriber:
    """Is notified of changes to jobs, in the transaction of the change. An exception that a method raises prevents it.

    Subclasses override the methods that they need.
    """

    def resolve_request(self, request: JobRequest) -> JobRequest:
        """Called before a job is created. Returns its request with the settings that it leaves to the server."""
        return request

    def check_adapter(self, tenant: str, request: JobRequest) -> None:
        """Called when a user submits a job. Raises Conflict if the adapter of the job belongs to another user."""

    def admit(self, tenant: str, request: JobRequest) -> None:
        """Called before a job is stored. Raises an error if it must not be."""

    def created(self, job: Job) -> None:
        """Called after a job was stored."""

    def begin(self, job: Job, device_id: str) -> None:
        """Called before a device gets a job. Raises BudgetExceeded if it must not."""

    def ended(self, job: Job) -> None:
        """Called after a job has succeeded, failed or been cancelled."""


WARM_STARTS: Port[Callable[[Session], WarmStarts]] = Port("jobs.warm_starts")
SUBSCRIBERS: Port[tuple[Callable[[Session], JobSubscriber], ...]] = Port("jobs.subscribers")
# Checks outside of any transaction that every answer is known that submitting a private job will need. Raises what the
# request is refused with, or `shared.federation.accounting.NotAccounted`.
PREPARE_PRIVACY: Port[Callable[[Database, str, JobRequest], None]] = Port("jobs.prepare_privacy")
# Returns what a device must know of the round that its job belongs to. Called only for jobs of a round.
ROUND_TASK: Port[Callable[[Session, Job], RoundTask]] = Port("jobs.round_task")


def subscribers(session: Session) -> list[JobSubscriber]:
    """Returns the subscribers for one transaction, in the order in which they are notified."""
    return [subscribe(session) for subscribe in SUBSCRIBERS.get()]


class JobLifecycle:
    """Changes to jobs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._jobs = JobRepository(session)
        self._queue = QueueRepository(session)
        self._programs = ProgramRepository(session)
        self._subscribers = subscribers(session)
        self._signed: dict[str, SignedManifest | None] = {}  # by recipe: one program may make many jobs ready

    def begin(self, job: Job) -> None:
        """Stores a new job with its start tag and its first event."""
        job.start_tag = self._queue.next_start_tag(job.tenant, job.user)
        self._enqueue(job)
        job.events = 1  # inserted with the job
        self._jobs.add(job)
        self._request_program(job)
        self._jobs.store_latest_event(job, JOB_EVENT, job.view().model_dump_json())

    def move(self, job: Job, state: JobState, **changes: Any) -> None:
        """Moves a job to `state` and sets other columns with it. Raises Conflict if the move is not allowed."""
        before, now = job.state, utc_now()
        if job.hides_figures and (result := changes.get("result")) is not None:
            changes["result"] = redacted_result(result)
        change_state(job, state, TRANSITIONS, f"job {job.id}", changes)
        job.times = job.times.after(before, now)
        if state.final:
            _continue_series(job, now)
            for subscriber in self._subscribers:
                subscriber.ended(job)
        self._enqueue(job)
        if before not in AWAITING_PROGRAM:
            self._request_program(job)
        job.updated_at = now
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def _request_program(self, job: Job) -> None:
        """Requests the compile task of a program that no other job of the tenant waits for. It must be locked."""
        if job.state in AWAITING_PROGRAM and not self._jobs.awaits_program(job.recipe_id, job.tenant, job.number):
            request_task(self._session, COMPILE, job.recipe_id, job.tenant)

    def progress(self, job: Job, progress: Progress) -> None:
        """Stores the progress of training.

        Equal progress, for example of a waiting device, adds no event, nor does progress beyond the tenant's quota.
        """
        job.updated_at = utc_now()
        progress = redacted_progress(progress) if job.hides_figures else progress
        if progress == job.progress:
            return
        job.progress = progress
        if job.events < job.max_events:
            self._jobs.add_event(job, PROGRESS_EVENT, progress.model_dump_json())

    def choose_start(self, job: Job, program: ProgramManifest, chosen: JobStart | None) -> None:
        """Pins the start that the device has chosen, as an event. Raises as `WarmStarts.choose`."""
        WARM_STARTS.get()(self._session).choose(job, program, chosen)
        job.updated_at = utc_now()
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def signed_program(self, job: Job) -> SignedManifest | None:
        """Returns the signed program of a job, read once for all jobs of a recipe; None before it is compiled."""
        if job.recipe_id not in self._signed:
            self._signed[job.recipe_id] = self._programs.signed(job.recipe_id)
        return self._signed[job.recipe_id]

    def _enqueue(self, job: Job) -> None:
        """Puts a ready job into its lane, and removes any other job from its lane."""
        if job.state is not JobState.READY:
            job.lane_number = None
            return
        signed = self.signed_program(job)
        cohort = None if job.round is None else job.round.cohort
        needs = needs_of(job.request, job.recipe, None if signed is None else signed.manifest, cohort, job.start_user)
        lane = self._queue.lane(job, needs)
        job.lane_number = lane.number
        mark_ready(self._session, lane)


def follow_program(session: Session, program: Program) -> None:
    """Moves the jobs that wait for a program to the state that follows from the program's, with its error."""
    follow = JOB_STATES[program.state]
    error = {"error": program.error} if program.state is ProgramState.FAILED else {}
    lifecycle = JobLifecycle(session)
    for job in JobRepository(session).awaiting_program(program.recipe_id):
        if job.state is not follow:
            progress = None if job.progress is None or job.progress.phase == "compiling" else job.progress
            lifecycle.move(job, follow, progress=progress, **error)


def show_compile_progress(session: Session, recipe_id: str, progress: Progress) -> None:
    """Shows the progress of a compilation in the jobs that wait for the program."""
    lifecycle = JobLifecycle(session)
    for job in JobRepository(session).awaiting_program(recipe_id):
        lifecycle.progress(job, progress)


@dataclass(frozen=True)
class ResolvedJob:
    """A resolved request: the base model, the complete task and recipe, and the version that the run continues.

    start_user: whose version it is, if another user's than the job's. hides_figures: no figures of the data are stored.
    estimator_reason: why the recipe has its estimator; None if the request names it.
    """

    base: BaseModelEntry
    task: Task
    recipe: Recipe
    start: Parent | None
    start_user: str | None = None
    hides_figures: bool = False
    estimator_reason: str | None = None


class JobService:
    """Jobs in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._jobs = JobRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._subscribers = subscribers(session)
        self._bases = BaseService(session, artifacts)

    def submit(self, tenant: str, request: JobRequest, series: str | None = None) -> Job:
        """Creates a job, which is READY at once if its recipe was compiled before.

        series: to which it belongs; None: a job that repeats begins one.

        Raises UnknownBase, InvalidTask, InvalidRecipe, NotFound for an unknown device, DeviceNotBound for one that does
        not train for the user, Conflict if the adapter belongs to another user or was deleted, BudgetExceeded,
        QuotaExceeded, and the errors of `WarmStarts` for an invalid start.
        """
        start = None
        if isinstance(request.start, JobStart):
            request, start = WARM_STARTS.get()(self._session).pin(tenant, request, request.start)
        for subscriber in self._subscribers:
            request = subscriber.resolve_request(request)
        base = self._bases.get(request.base)
        task = resolve_task(request)
        start_user = None if start is None or start.user == request.user else start.user
        self._check_device(tenant, request, start_user)
        spare = spare_memory(self._session, tenant, request) if request.recipe.estimator == "auto" else None
        choice = choose_recipe(request, task, base, self._bases.tokenizer(base), spare)
        recipe = choice.recipe
        if recipe.calibration is not None:
            CalibrationService(self._session, self._artifacts).check(recipe, base.shape)
        if start is not None:
            start.check(recipe, base.shape)
        # Stored explicitly, because a later release may have another default.
        training = request.training.model_copy(update={"eps": request.training.eps_for(recipe)})
        request = request.model_copy(update={"training": training})
        parent = None if start is None else start.parent
        self._check_user(tenant, request)
        resolved = ResolvedJob(base, task, recipe, parent, start_user, estimator_reason=choice.reason)
        job = self._begin(tenant, request, resolved, series=series)
        quotas = QuotaService(self._session)
        quotas.check(tenant, Quota.WAITING_JOBS, lambda: self._jobs.count_waiting(tenant))
        quotas.check(tenant, Quota.JOBS_PER_DAY, lambda: self._jobs.count_submitted(tenant, utc_now() - DAY))
        if job.series == job.id:
            quotas.check(tenant, Quota.SERIES, lambda: self._jobs.count_series(tenant))
        return job

    def repeat(self, number: int) -> None:
        """Submits the job that follows one in its series, from the adapter's `main` if it has one; does nothing if it
        is not due. Raises as `submit`.
        """
        former = self._jobs.by_number(number)
        self._lock_series(former)
        former = self._jobs.latest_of_series(former)
        if former.number != number or former.repeat_at is None or former.repeat_at > utc_now():
            return
        former.repeat_at = None
        main = former.request.model_copy(update={"start": JobStart(adapter=former.adapter)})
        try:
            self.submit(former.tenant, main, former.series)
        except (AdapterNotFound, RevisionNotFound):  # no version was approved so far
            self.submit(former.tenant, former.request, former.series)

    def _lock_series(self, job: Job) -> None:
        """Waits for other transactions that create or cancel jobs of the same series."""
        lock_name(self._session, "series", job.tenant, job.series or job.id)

    def submit_part(self, tenant: str, request: JobRequest, resolved: ResolvedJob, part: RoundRef) -> Job:
        """Creates a resolved job for a member's part in a cohort's round.

        Raises NotFound if its device was revoked, DeviceNotBound if the member was unbound from it.
        """
        self._check_device(tenant, request, None)
        return self._begin(tenant, request, resolved, part)

    def _begin(
        self,
        tenant: str,
        request: JobRequest,
        resolved: ResolvedJob,
        part: RoundRef | None = None,
        series: str | None = None,
    ) -> Job:
        recipe = resolved.recipe
        for subscriber in self._subscribers:
            subscriber.admit(tenant, request)
        state = ProgramService(self._session).request(recipe, resolved.base)
        now, job_id = utc_now(), new_id("job")
        job = Job(
            id=job_id,
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
            series=series or (None if request.repeat is None else job_id),
            hides_figures=resolved.hides_figures,
            only_device_id=request.device,
            attempts=0,
            events=0,
            max_events=QuotaService(self._session).limits(tenant)[Quota.JOB_EVENTS],
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
        if request.device is not None:
            users = (request.user,) if start_user is None else (request.user, start_user)
            BindingService(self._session).check(tenant, request.device, *users)

    def _check_user(self, tenant: str, request: JobRequest) -> None:
        """Raises Conflict unless the adapter is the user's, because an adapter learns from one user's data."""
        lock_name(self._session, "adapter", tenant, request.adapter)
        for subscriber in self._subscribers:
            subscriber.check_adapter(tenant, request)
        owner = self._jobs.other_user(tenant, request.adapter, request.user)
        if owner is not None:
            raise Conflict(f"adapter {request.adapter!r} is user {owner!r}'s; choose another name")

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Cancels a job; its device learns of it at the next heartbeat. Of a series, the latest job is cancelled.

        Returns the job that was cancelled, or after which its series ended. Raises NotFound, or Conflict if the job has
        succeeded or failed and is followed by none.
        """
        job = self._jobs.get(tenant, job_id)
        if job.series is None:
            job = self._jobs.get(tenant, job_id, lock=True)
        else:
            self._lock_series(job)
            job = self._jobs.latest_of_series(job)
        if job.repeat_at is not None:
            job.end_series(CANCELLED)
        elif job.state is not JobState.CANCELLED:
            self._lifecycle.move(job, JobState.CANCELLED)
            LeaseRepository(self._session).cancel(job.number, utc_now())
        return job


def _continue_series(job: Job, now: datetime) -> None:
    """Notes when the job after one that has ended is due, or why its series ends."""
    repeat = job.request.repeat
    if repeat is None:
        return
    next_at = repeat.after(now)
    if job.state is JobState.CANCELLED:
        job.end_series(CANCELLED)
    elif job.error is not None and job.error.code in OWNER_REFUSALS:
        job.end_series(job.error.detail)
    elif repeat.until is not None and next_at > repeat.until:
        job.end_series(f"it repeats until {repeat.until.isoformat()}")
    else:
        job.repeat_at = next_at
