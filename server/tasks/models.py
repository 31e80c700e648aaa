"""The tables of the task queue: tasks, requests for them, turns of tenants, workers and their machines."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError


class TaskState(StrEnum):
    """The state of a task."""

    WAITING = "waiting"  # claimed once it is requested and `not_before` has passed
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Task(Numbered, Table):
    """One piece of heavy work on one subject. While it runs, one worker holds it until `lease_expires_at`."""

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("kind", "subject"), Index("ix_tasks_state", "state", "number"))

    kind: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(64))  # the id of the program, conversion or round
    state: Mapped[TaskState] = mapped_column(word(TaskState))
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # estimated peak
    attempts: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[datetime | None] = mapped_column(Moment)  # None: at once
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"), index=True)
    lease_expires_at: Mapped[datetime | None] = mapped_column(Moment)
    error: Mapped[JobError | None] = mapped_column(Document(JobError))  # why it failed

    @property
    def name(self) -> str:
        """Identifies the task in logs and in an engine's queue."""
        return f"{self.kind}:{self.subject}"


class TaskRequest(Numbered, Table):
    """Something that waits for a task, for example a job. A waiting task without a request is not run."""

    __tablename__ = "task_requests"

    task_number: Mapped[int] = mapped_column(ForeignKey("tasks.number", ondelete="CASCADE"), index=True)
    requester: Mapped[str] = mapped_column(String(96), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    tenant: Mapped[str] = mapped_column(String(96))
    priority: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(Moment)


Index(
    "ix_task_requests_order",
    TaskRequest.tenant,
    TaskRequest.kind,
    TaskRequest.priority.desc(),
    TaskRequest.number,
    TaskRequest.task_number,
)


class TaskTurn(Table):
    """The turn in which a tenant's latest task of a kind was claimed; turns are counted over all tenants."""

    __tablename__ = "task_turns"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger, index=True)


class WorkerProcess(Table):
    """A worker process and the most memory that it and its child processes took, bytes."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pid: Mapped[int] = mapped_column()
    host: Mapped[str] = mapped_column(String(255), default="")
    pid_space: Mapped[str] = mapped_column(String(255), default="")  # where `pid` identifies a process
    started_at: Mapped[datetime] = mapped_column(Moment)
    seen_at: Mapped[datetime] = mapped_column(Moment)
    peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    compiler_peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)


class WorkerHost(Table):
    """A machine with workers, and how much memory its tasks may take together, bytes."""

    __tablename__ = "worker_hosts"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    limited: Mapped[bool] = mapped_column()  # an operator set the limit; otherwise a single task may take more
    seen_at: Mapped[datetime] = mapped_column(Moment)
