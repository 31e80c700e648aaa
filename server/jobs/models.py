"""The tables of jobs and their events."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String, Text, false, text
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError, JobRequest, JobState, JobSummary, JobView, Progress, Result, RoundRef
from shared.recipe import Recipe
from shared.registry import Parent
from shared.task import Task

JOB_EVENT, PROGRESS_EVENT = "job", "progress"  # kinds of events
_QUEUED = text("state = 'queued'")
# Ended jobs whose progress events are still stored. Queries must use this exact text for the partial index to match.
NOT_PURGED = text("NOT purged AND state IN ('succeeded', 'failed', 'cancelled')")


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
        Index("ix_jobs_ended", "updated_at", "number", sqlite_where=NOT_PURGED, postgresql_where=NOT_PURGED),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    state: Mapped[JobState] = mapped_column(word(JobState))
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
    quiet: Mapped[bool] = mapped_column(default=False, server_default=false())  # no figures of the data are stored
    only_device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    start_tag: Mapped[int] = mapped_column(default=0, server_default="0")
    lane_number: Mapped[int | None] = mapped_column()  # while it waits for a device
    attempts: Mapped[int] = mapped_column(default=0)
    events: Mapped[int] = mapped_column(default=0)
    purged: Mapped[bool] = mapped_column(default=False, server_default=false())  # its progress events were removed
    progress: Mapped[Progress | None] = mapped_column(Document(Progress))
    result: Mapped[Result | None] = mapped_column(Document(Result))
    adapter_version: Mapped[int | None] = mapped_column()
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(Moment)
    updated_at: Mapped[datetime] = mapped_column(Moment)

    def summary(self) -> JobSummary:
        """Returns the job as a list shows it."""
        return JobSummary(
            id=self.id,
            state=self.state,
            base=self.request.base,
            user=self.user,
            adapter=self.adapter,
            dataset=self.dataset,
            task=self.task.name,
            recipe_id=self.recipe_id,
            priority=self.priority,
            round=self.round,
            attempts=self.attempts,
            device_id=self.device_id,
            progress=self.progress,
            adapter_version=self.adapter_version,
            error=self.error,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )

    def view(self) -> JobView:
        """Returns the job as the API shows it."""
        return JobView(
            id=self.id,
            state=self.state,
            request=self.request,
            task=self.task,
            recipe=self.recipe,
            recipe_id=self.recipe_id,
            estimator_reason=self.estimator_reason,
            round=self.round,
            attempts=self.attempts,
            device_id=self.device_id,
            progress=self.progress,
            result=self.result,
            adapter_version=self.adapter_version,
            error=self.error,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )


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
