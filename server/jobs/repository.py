"""The tables of jobs and their events, and all their SQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict
from sqlalchemy import ForeignKey, Index, String, Text, delete, false, func, or_, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.catalog.calibrations.service import names_calibration
from server.database.columns import MAX_INTEGER, Document, Numbered, Table, UtcTime, text_enum, utc_now, view_of
from server.database.database import Repository, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.programs.service import Program, ProgramBlob
from shared.errors import NotFound
from shared.job import JobError, JobRequest, JobState, JobSummary, JobView, Progress, RoundRef
from shared.recipe import Recipe
from shared.registry import Parent
from shared.result import Result
from shared.task import Task

JOB_EVENT, PROGRESS_EVENT = "job", "progress"  # kinds of events
_QUEUED = text("state = 'queued'")
MAX_DUE = 1000  # jobs of series that are created at once
_REPEATS = text("repeat_at IS NOT NULL")
SUBMITTED = text("round IS NULL")  # by a person or a program, and not by a round of a cohort
# The one job of each series that has not ended. Queries must use this exact text for the partial index to match.
LATEST_OF_SERIES = text(
    "series IS NOT NULL AND (repeat_at IS NOT NULL OR state NOT IN ('succeeded', 'failed', 'cancelled'))"
)
# Ended jobs whose progress events are still stored. Queries must use this exact text for the partial index to match.
NOT_PURGED = text("NOT purged AND state IN ('succeeded', 'failed', 'cancelled')")


class StateTimes(BaseModel):
    """The seconds that a job was in each of its former states, and the start of its present one."""

    model_config = ConfigDict(frozen=True)

    seconds: dict[JobState, float] = {}
    since: AwareDatetime

    def after(self, state: JobState, now: datetime) -> StateTimes:
        """Returns the times once a job has left `state` at `now`."""
        spent = self.seconds.get(state, 0.0) + max((now - self.since).total_seconds(), 0.0)
        return StateTimes(seconds={**self.seconds, state: round(spent, 3)}, since=now)


class Job(Numbered, Table):
    """One request to personalize for one user."""

    __tablename__ = "jobs"
    __table_args__ = (
        # Each list of the API is answered by one of these indexes alone. Their columns are, in this order: the main
        # filter, the sort order, and the filters that may be combined with it.
        Index("ix_jobs_tenant", "tenant", "number"),
        Index("ix_jobs_state", "tenant", "state", "number", "user", "adapter", "recipe_id"),
        Index("ix_jobs_user", "tenant", "user", "number", "state", "adapter"),
        Index("ix_jobs_adapter", "tenant", "adapter", "number", "state", "user"),
        Index("ix_jobs_recipe", "recipe_id", "state", "tenant", "number"),
        Index("ix_jobs_lane", "lane_number", "start_tag", "number"),
        Index("ix_jobs_repeat", "repeat_at", sqlite_where=_REPEATS, postgresql_where=_REPEATS),
        Index(
            "ix_jobs_submitted",
            *("tenant", "created_at", "round"),
            sqlite_where=SUBMITTED,
            postgresql_where=SUBMITTED,
        ),
        Index(
            "ix_jobs_series",
            *("tenant", "series", "repeat_at", "state"),
            sqlite_where=LATEST_OF_SERIES,
            postgresql_where=LATEST_OF_SERIES,
        ),
        Index("ix_jobs_ended", "updated_at", "number", sqlite_where=NOT_PURGED, postgresql_where=NOT_PURGED),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    state: Mapped[JobState] = mapped_column(text_enum(JobState))
    request: Mapped[JobRequest] = mapped_column(Document(JobRequest))
    task: Mapped[Task] = mapped_column(Document(Task))
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"))
    estimator_reason: Mapped[str | None] = mapped_column(Text)  # where the server chose it
    adapter: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    dataset: Mapped[str] = mapped_column(String(96))
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    start: Mapped[Parent | None] = mapped_column(Document(Parent))  # the adapter version that it continues
    start_user: Mapped[str | None] = mapped_column(String(96))  # whose version it continues, if another user's
    round: Mapped[RoundRef | None] = mapped_column(Document(RoundRef))  # the cohort's round that it belongs to
    hides_figures: Mapped[bool] = mapped_column(default=False, server_default=false())  # no figures are stored
    only_device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    start_tag: Mapped[int] = mapped_column(default=0, server_default="0")
    lane_number: Mapped[int | None] = mapped_column()  # while it waits for a device
    attempts: Mapped[int] = mapped_column(default=0)
    events: Mapped[int] = mapped_column(default=0)
    max_events: Mapped[int] = mapped_column(default=10_000, server_default="10000")  # the quota when it was created
    purged: Mapped[bool] = mapped_column(default=False, server_default=false())  # its progress events were removed
    progress: Mapped[Progress | None] = mapped_column(Document(Progress))
    result: Mapped[Result | None] = mapped_column(Document(Result))
    adapter_version: Mapped[int | None] = mapped_column()
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    series: Mapped[str | None] = mapped_column(String(64))  # id of the first job, if it repeats
    repeat_at: Mapped[datetime | None] = mapped_column(UtcTime)  # when the next job of the series is due
    series_end: Mapped[str | None] = mapped_column(Text)  # why the series ended with this job
    times: Mapped[StateTimes] = mapped_column(Document(StateTimes), default=lambda: StateTimes(since=utc_now()))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    updated_at: Mapped[datetime] = mapped_column(UtcTime)

    def end_series(self, reason: str) -> None:
        """Ends the series of the job: no next one is created."""
        self.repeat_at, self.series_end = None, reason

    def summary(self) -> JobSummary:
        """Returns the job as a list shows it."""
        return view_of(JobSummary, self, base=self.request.base, task=self.task.name)

    def view(self) -> JobView:
        """Returns the job as the API shows it."""
        return view_of(JobView, self, next_at=self.repeat_at, state_seconds=self.times.seconds)


Index(
    "ix_jobs_queued",
    Job.tenant,
    Job.priority.desc(),
    Job.number,
    Job.recipe_id,
    sqlite_where=_QUEUED,
    postgresql_where=_QUEUED,
)


class JobEvent(Table):
    """An event of a job. `position` counts from 1 within the job."""

    __tablename__ = "job_events"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    data: Mapped[str] = mapped_column(Text)


AWAITING_PROGRAM = (JobState.QUEUED, JobState.COMPILING)  # states in which a job waits for its program
OPEN = tuple(state for state in JobState if not state.final)


class JobRepository(Repository):
    """Jobs in one session."""

    def get(self, tenant: str, job_id: str, *, lock: bool = False) -> Job:
        """Returns a job of a tenant. lock: until the transaction ends. Raises NotFound."""
        job = self._one(Job, Job.tenant == tenant, Job.id == job_id, lock=lock)
        if job is None:
            raise NotFound(f"there is no job {job_id!r}")
        return job

    def latest_of_series(self, job: Job) -> Job:
        """Returns the latest job of the series of a job, locked."""
        same = Job.tenant == job.tenant, Job.adapter == job.adapter, Job.series == job.series
        return self._session.scalars(locked(select(Job).where(*same).order_by(Job.number.desc()).limit(1))).one()

    def due(self, now: datetime) -> Sequence[int]:
        """Returns the numbers of the jobs whose series' next job is due."""
        statement = select(Job.number).where(Job.repeat_at <= now).order_by(Job.repeat_at).limit(MAX_DUE)
        return self._session.scalars(statement).all()

    def by_number(self, number: int) -> Job:
        """Returns a job that is known to exist."""
        return self._session.get_one(Job, number)

    def page(
        self,
        tenant: str,
        request: PageRequest,
        state: JobState | None = None,
        user: str | None = None,
        adapter: str | None = None,
    ) -> PageRows[Job]:
        """Returns a page of a tenant's jobs, newest first. state, user, adapter: of these jobs only; None: of any."""
        wanted = (Job.tenant, tenant), (Job.state, state), (Job.user, user), (Job.adapter, adapter)
        conditions = [column == value for column, value in wanted if value is not None]
        return page_of(self._session, Job, request, *conditions)

    def counts(self, tenant: str) -> dict[JobState, int]:
        """Returns how many jobs of a tenant are in each state, from an index alone."""
        statement = select(Job.state, func.count()).where(Job.tenant == tenant).group_by(Job.state)
        return dict.fromkeys(JobState, 0) | {state: count for state, count in self._session.execute(statement)}  # noqa: C416

    def count_waiting(self, tenant: str) -> int:
        """Returns how many jobs of a tenant wait for their program or for a device, from an index alone."""
        return self._count(Job.tenant == tenant, Job.state.in_((*AWAITING_PROGRAM, JobState.READY)))

    def count_submitted(self, tenant: str, since: datetime) -> int:
        """Returns how many jobs of a tenant were submitted since a time, from an index alone."""
        return self._count(Job.tenant == tenant, Job.created_at > since, SUBMITTED)

    def count_series(self, tenant: str) -> int:
        """Returns how many series of a tenant have not ended, from an index alone."""
        return self._count(Job.tenant == tenant, LATEST_OF_SERIES)

    def most_events(self, tenant: str) -> int:
        """Returns the number of events of the job in training that has the most."""
        training = Job.tenant == tenant, Job.state == JobState.TRAINING
        return self._session.scalar(select(func.max(Job.events)).where(*training)) or 0

    def programs_page(self, tenant: str, request: PageRequest) -> PageRows[Program]:
        """Returns a page of the programs that jobs of a tenant use, newest first."""
        used = select(Job.number).where(Job.recipe_id == Program.recipe_id, Job.tenant == tenant).exists()
        return page_of(self._session, Program, request, used)

    def awaiting_program(self, recipe_id: str) -> Sequence[Job]:
        """Returns the jobs that wait for the program of a recipe, oldest first and locked."""
        return self._all(Job, Job.recipe_id == recipe_id, Job.state.in_(AWAITING_PROGRAM), lock=True)

    def awaits_program(self, recipe_id: str, tenant: str, besides: int) -> bool:
        """Returns whether a job of a tenant waits for the program of this recipe, besides the job of this number."""
        jobs = select(Job.number).where(Job.recipe_id == recipe_id, Job.state.in_(AWAITING_PROGRAM))
        return self._session.scalar(jobs.where(Job.tenant == tenant, Job.number != besides).limit(1)) is not None

    def pinned(self, device_id: str) -> Sequence[Job]:
        """Returns the open jobs that only this device may train, locked."""
        return self._all(Job, Job.only_device_id == device_id, Job.state.in_(OPEN), lock=True)

    def pinned_of(self, device_id: str, user: str) -> Sequence[Job]:
        """Returns the open jobs of a user that only this device may train, locked.

        Also those of other users that start from the user's adapter.
        """
        whose = or_(Job.user == user, Job.start_user == user)
        return self._all(Job, Job.only_device_id == device_id, whose, Job.state.in_(OPEN), lock=True)

    def other_user(self, tenant: str, adapter: str, user: str) -> str | None:
        """Returns a user other than `user` whose open job trains that adapter."""
        statement = select(Job.user).where(
            Job.tenant == tenant, Job.adapter == adapter, Job.user != user, Job.state.in_(OPEN)
        )
        return self._session.scalar(statement.limit(1))

    def add_event(self, job: Job, kind: str, data: str) -> None:
        """Appends an event to a job's events."""
        job.events += 1
        self.store_latest_event(job, kind, data)

    def store_latest_event(self, job: Job, kind: str, data: str) -> None:
        """Stores the latest event of a job, whose number is `job.events`."""
        self._session.add(JobEvent(job_number=job.number, position=job.events, kind=kind, data=data))

    def events_after(self, job_number: int, position: int, limit: int) -> Sequence[JobEvent]:
        """Returns a job's events after a position, in order."""
        statement = (
            select(JobEvent)
            .where(JobEvent.job_number == job_number, JobEvent.position > min(position, MAX_INTEGER))
            .order_by(JobEvent.position)
            .limit(limit)
        )
        return self._session.scalars(statement).all()

    def event_counts(self, numbers: set[int]) -> dict[int, int]:
        """Returns how many events each of these jobs has had."""
        statement = select(Job.number, Job.events).where(Job.number.in_(numbers))
        return {number: events for number, events in self._session.execute(statement)}  # noqa: C416  rows are not pairs

    def purge_events(self, before: datetime, limit: int) -> Sequence[int]:
        """Removes the progress events of up to `limit` jobs that ended before a time. Returns their numbers."""
        ended = select(Job).where(NOT_PURGED, Job.updated_at < before).order_by(Job.updated_at).limit(limit)
        jobs = self._session.scalars(locked(ended, skip=True)).all()
        numbers = [job.number for job in jobs]
        progress = delete(JobEvent).where(JobEvent.job_number.in_(numbers), JobEvent.kind == PROGRESS_EVENT)
        self._session.execute(progress, execution_options={"synchronize_session": False})
        for job in jobs:
            job.purged = True
        return numbers


def job_with_calibration(session: Session, sha256: str) -> str | None:
    """Returns the name of an unfinished job whose A comes from the calibration of that sha256."""
    job = session.scalar(select(Job.id).where(Job.state.in_(OPEN), names_calibration(Job.recipe, sha256)).limit(1))
    return None if job is None else f"job {job}"


def is_awaited(session: Session, recipe_id: str) -> bool:
    """Returns whether any job waits for the program of a recipe."""
    jobs = select(Job.number).where(Job.recipe_id == recipe_id, Job.state.in_(AWAITING_PROGRAM))
    return session.scalar(jobs.limit(1)) is not None


def program_of_tenant(session: Session, tenant: str, recipe_id: str) -> Program | None:
    """Returns the program of a recipe that one of the tenant's jobs uses."""
    used = select(Job.number).where(Job.tenant == tenant, Job.recipe_id == recipe_id).exists()
    return session.scalar(select(Program).where(Program.recipe_id == recipe_id, used))


def file_of_tenant(session: Session, tenant: str, sha256: str) -> ProgramBlob | None:
    """Returns a file of a program that one of the tenant's jobs uses."""
    statement = (
        select(ProgramBlob)
        .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
        .where(ProgramBlob.sha256 == sha256, Job.tenant == tenant)
    )
    return session.scalar(statement.limit(1))
