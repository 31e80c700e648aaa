"""The tables of jobs and their events."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError, JobRequest, JobState, JobView, Progress, Result
from shared.recipe import Recipe
from shared.task import Task

_QUEUED = text("state = 'queued'")


class Job(Numbered, Table):
    """One request to personalize for one user."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_waiting", "tenant", "state", "dataset"),
        Index("ix_jobs_lane", "lane_number", "turn", "number"),
        Index("ix_jobs_queued", "tenant", "priority", "number", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(96))
    state: Mapped[JobState] = mapped_column(word(JobState))
    request: Mapped[JobRequest] = mapped_column(Document(JobRequest))
    task: Mapped[Task] = mapped_column(Document(Task))
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), index=True)
    adapter: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    dataset: Mapped[str] = mapped_column(String(96))
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    only_device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    turn: Mapped[int] = mapped_column(default=0, server_default="0")
    lane_number: Mapped[int | None] = mapped_column()  # where it waits for a device, while it does
    attempts: Mapped[int] = mapped_column(default=0)
    events: Mapped[int] = mapped_column(default=0)
    progress: Mapped[Progress | None] = mapped_column(Document(Progress))
    result: Mapped[Result | None] = mapped_column(Document(Result))
    adapter_version: Mapped[int | None] = mapped_column()
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(Moment)
    updated_at: Mapped[datetime] = mapped_column(Moment)

    def view(self) -> JobView:
        """As the API shows it."""
        return JobView(
            id=self.id,
            state=self.state,
            request=self.request,
            task=self.task,
            recipe=self.recipe,
            recipe_id=self.recipe_id,
            attempts=self.attempts,
            device_id=self.device_id,
            progress=self.progress,
            result=self.result,
            adapter_version=self.adapter_version,
            error=self.error,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )


class JobEvent(Table):
    """Something that happened to a job; `position` counts from 1 within the job."""

    __tablename__ = "job_events"

    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    data: Mapped[str] = mapped_column(Text)
