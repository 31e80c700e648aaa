"""The tables and all SQL of the work queue: tasks, requests for them, turns of tenants, workers and their machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    ForeignKey,
    Index,
    Select,
    String,
    UniqueConstraint,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, text_enum, utc_now
from server.database.database import add_if_absent, locked
from shared.job import JobError

HOST_LASTS = timedelta(minutes=5)  # a machine without a heartbeat for longer is ignored
OVERDUE = timedelta(minutes=10)  # smaller tasks do not overtake a large task that has waited for longer


class TaskState(StrEnum):
    """The state of a task."""

    WAITING = "waiting"  # begins in a turn of a tenant that requested it, once `not_before` has passed
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNFINISHED = (TaskState.WAITING, TaskState.RUNNING)


class Task(Numbered, Table):
    """One piece of heavy work on one subject. While it runs, one worker has claimed it."""

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("kind", "subject"), Index("ix_tasks_state", "state", "number"))

    kind: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(64))  # the id of the program or round
    state: Mapped[TaskState] = mapped_column(text_enum(TaskState))
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # estimated peak
    attempts: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[datetime | None] = mapped_column(UtcTime)  # None: at once
    unavailable_since: Mapped[datetime | None] = mapped_column(UtcTime)  # the task waits for a store or a disk
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"), index=True)
    claim_id: Mapped[str | None] = mapped_column(String(64))  # the running attempt
    error: Mapped[JobError | None] = mapped_column(Document(JobError))  # why it failed


class TaskRequest(Numbered, Table):
    """Something that waits for a task, for example a job. A waiting task without a request is not run."""

    __tablename__ = "task_requests"

    task_number: Mapped[int] = mapped_column(ForeignKey("tasks.number", ondelete="CASCADE"), index=True)
    requester: Mapped[str] = mapped_column(String(96), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    tenant: Mapped[str] = mapped_column(String(96))
    priority: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(UtcTime)


Index(
    "ix_task_requests_order",
    TaskRequest.tenant,
    TaskRequest.kind,
    TaskRequest.priority.desc(),
    TaskRequest.number,
    TaskRequest.task_number,
)


class TaskTurn(Table):
    """The start tag of a tenant's next turn for a kind of task; of the tenant `SERVED`: that of the latest turn."""

    __tablename__ = "task_turns"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger)


SERVED = "*"  # no tenant can have this name


class WorkerProcess(Table):
    """A worker process and the most memory that it and its child processes took, bytes."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pid: Mapped[int] = mapped_column()
    host: Mapped[str] = mapped_column(String(255), default="")
    pid_space: Mapped[str] = mapped_column(String(255), default="")  # where `pid` identifies a process
    started_at: Mapped[datetime] = mapped_column(UtcTime)
    seen_at: Mapped[datetime] = mapped_column(UtcTime)
    peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    compiler_peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)


class WorkerHost(Table):
    """A machine with workers, and how much memory its tasks may take together, bytes."""

    __tablename__ = "worker_hosts"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    limited: Mapped[bool] = mapped_column()  # an operator set the limit; otherwise a single task may take more
    seen_at: Mapped[datetime] = mapped_column(UtcTime)


class TaskRepository:
    """Tasks, requests and turns in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def counts(self) -> dict[str, dict[TaskState, int]]:
        """Returns how many tasks of each kind are in each state."""
        counts: dict[str, dict[TaskState, int]] = {}
        statement = select(Task.kind, Task.state, func.count()).group_by(Task.kind, Task.state).order_by(Task.kind)
        for kind, state, number in self._session.execute(statement):
            counts.setdefault(kind, dict.fromkeys(TaskState, 0))[state] = number
        return counts

    def ensure(self, kind: str, subject: str, memory_bytes: int) -> Task:
        """Returns the task of a subject, locked, and inserts it if it does not exist."""
        values = {"state": TaskState.WAITING, "memory_bytes": memory_bytes, "attempts": 0}
        add_if_absent(self._session, Task, kind=kind, subject=subject, **values)
        return self._session.scalars(locked(_of(kind, subject))).one()

    def get(self, kind: str, subject: str) -> Task | None:
        """Returns the task of a subject."""
        return self._session.scalar(_of(kind, subject))

    def get_locked(self, kind: str, subject: str) -> Task | None:
        """Returns the task of a subject, locked."""
        return self._session.scalar(locked(_of(kind, subject)))

    def of(self, kind: str, subjects: Sequence[str]) -> dict[str, Task]:
        """Returns the tasks of several subjects, by subject."""
        tasks = self._session.scalars(select(Task).where(Task.kind == kind, Task.subject.in_(subjects)))
        return {task.subject: task for task in tasks}

    def tenants(self, task: Task) -> Sequence[str]:
        """Returns the tenants that request a task."""
        statement = select(TaskRequest.tenant).where(TaskRequest.task_number == task.number).distinct()
        return self._session.scalars(statement.order_by(TaskRequest.tenant)).all()

    def is_requested(self, task: Task, tenant: str | None = None) -> bool:
        """Returns whether a task has requests, of any tenant or of this one."""
        request = select(TaskRequest.number).where(TaskRequest.task_number == task.number)
        if tenant is not None:
            request = request.where(TaskRequest.tenant == tenant)
        return self._session.scalar(request.limit(1)) is not None

    def add_request(self, task: Task, requester: str, tenant: str, priority: int) -> None:
        """Adds a request for a task."""
        add_if_absent(
            self._session,
            TaskRequest,
            task_number=task.number,
            requester=requester,
            kind=task.kind,
            tenant=tenant,
            priority=priority,
            created_at=utc_now(),
        )

    def remove_request(self, requester: str) -> None:
        """Removes a request if it exists."""
        self._session.execute(delete(TaskRequest).where(TaskRequest.requester == requester))

    def next_tag(self, kind: str, tenant: str) -> int:
        """Returns the start tag of a tenant's next turn and advances it."""
        add_if_absent(self._session, TaskTurn, tenant=tenant, kind=kind, turn=0)
        row = self._session.scalars(
            locked(select(TaskTurn).where(TaskTurn.tenant == tenant, TaskTurn.kind == kind))
        ).one()
        served = self._session.scalar(select(TaskTurn.turn).where(TaskTurn.tenant == SERVED, TaskTurn.kind == kind))
        tag = max(row.turn, served or 0)
        row.turn = tag + 1
        return tag

    def serve(self, kind: str, tag: int) -> None:
        """Stores that a turn with this start tag began."""
        add_if_absent(self._session, TaskTurn, tenant=SERVED, kind=kind, turn=0)
        served = update(TaskTurn).where(TaskTurn.tenant == SERVED, TaskTurn.kind == kind, TaskTurn.turn < tag)
        self._session.execute(served.values(turn=tag))

    def next(self, kind: str, tenant: str, now: datetime, max_bytes: float = float("inf")) -> Task | None:
        """Returns the tenant's next task of at most `max_bytes`: that of the highest priority, then the oldest."""
        statement = _requested(kind, tenant).where(_can_start(now))
        if max_bytes != float("inf"):
            statement = statement.where(Task.memory_bytes <= max_bytes)
        ordered = statement.order_by(TaskRequest.priority.desc(), TaskRequest.number)
        return self._session.scalar(ordered.limit(1))

    def waiting(self, kind: str, tenant: str) -> Task | None:
        """Returns the waiting task of a tenant that may begin first."""
        waiting = _requested(kind, tenant).where(Task.state == TaskState.WAITING)
        return self._session.scalar(waiting.order_by(Task.not_before.asc().nulls_first()).limit(1))

    def is_overdue(self, above: float, at_most: float, now: datetime) -> bool:
        """Returns whether a task of a size between these bounds, in bytes, has waited for longer than `OVERDUE`."""
        old = TaskRequest.created_at < now - OVERDUE
        size = (Task.memory_bytes > max(0, above)) & (Task.memory_bytes <= at_most)
        statement = select(Task.number).join(TaskRequest, TaskRequest.task_number == Task.number)
        return self._session.scalar(statement.where(_can_start(now), size, old).limit(1)) is not None

    def startable_locked(self, task: Task, now: datetime) -> bool:
        """Locks a task and returns whether it may still begin."""
        statement = locked(select(Task).where(Task.number == task.number, _can_start(now)))
        return self._session.scalar(statement) is not None

    def claimed_locked(self, kind: str, subject: str, claim_id: str) -> Task | None:
        """Returns the task, locked, if this attempt still runs."""
        statement = _of(kind, subject).where(Task.claim_id == claim_id, Task.state == TaskState.RUNNING)
        return self._session.scalar(locked(statement))

    def running(self) -> Sequence[Task]:
        """Returns the running tasks."""
        return self._session.scalars(select(Task).where(Task.state == TaskState.RUNNING).order_by(Task.number)).all()

    def unfinished(self, kind: str) -> Sequence[Task]:
        """Returns the unfinished tasks of a kind, locked."""
        statement = select(Task).where(Task.kind == kind, Task.state.in_(UNFINISHED)).order_by(Task.number)
        return self._session.scalars(locked(statement)).all()

    def end(self, task: Task, state: TaskState) -> None:
        """Ends a locked task and removes all its requests."""
        task.state = state
        task.worker_id = task.claim_id = task.not_before = task.unavailable_since = None
        self._session.execute(delete(TaskRequest).where(TaskRequest.task_number == task.number))
        self._session.flush()


@dataclass(frozen=True)
class Capacity:
    """Memory for tasks, bytes: free on this machine, in all on this machine, and on the largest machine."""

    free: float = float("inf")
    machine: float = float("inf")
    largest: float = float("inf")


class WorkerRepository:
    """Workers and their machines in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, worker: WorkerProcess) -> None:
        """Stores a new worker."""
        self._session.add(worker)
        self._session.flush()

    def get(self, worker_id: str) -> WorkerProcess:
        """Returns a worker that is known to exist."""
        return self._session.get_one(WorkerProcess, worker_id)

    def seen(self, since: datetime) -> Sequence[WorkerProcess]:
        """Returns the workers with a heartbeat after `since`."""
        return self._session.scalars(select(WorkerProcess).where(WorkerProcess.seen_at >= since)).all()

    def peaks(self, since: datetime) -> tuple[int, int]:
        """Returns the peak memory, bytes, of workers and of their child processes, for workers seen after `since`."""
        statement = select(func.max(WorkerProcess.peak_rss_bytes), func.max(WorkerProcess.compiler_peak_rss_bytes))
        worker, compiler = self._session.execute(statement.where(WorkerProcess.seen_at >= since)).one()
        return worker or 0, compiler or 0

    def set_host(self, name: str, memory_bytes: int, limited: bool, now: datetime) -> None:
        """Stores the memory of a machine for tasks, and the time of this heartbeat."""
        add_if_absent(self._session, WorkerHost, name=name, memory_bytes=memory_bytes, limited=limited, seen_at=now)
        host = self._session.get_one(WorkerHost, name)
        host.memory_bytes, host.limited, host.seen_at = memory_bytes, limited, now

    def capacity_locked(self, worker_id: str, now: datetime) -> Capacity:
        """Returns the memory for tasks of a worker's machine, locked so that its workers claim tasks in turn.

        Without an operator's limit a task of any size may run alone.
        """
        its_host = select(WorkerHost).join(WorkerProcess, WorkerProcess.host == WorkerHost.name)
        host = self._session.scalar(locked(its_host.where(WorkerProcess.id == worker_id), of=WorkerHost))
        if host is None:
            return Capacity()
        running = select(func.sum(Task.memory_bytes)).join(WorkerProcess, WorkerProcess.id == Task.worker_id)
        used = self._session.scalar(running.where(Task.state == TaskState.RUNNING, WorkerProcess.host == host.name))
        hosts = self._session.scalars(select(WorkerHost).where(WorkerHost.seen_at >= now - HOST_LASTS)).all()
        unlimited = any(not each.limited for each in hosts)
        return Capacity(
            free=float("inf") if not used and not host.limited else host.memory_bytes - int(used or 0),
            machine=host.memory_bytes,
            largest=float("inf") if unlimited else max([host.memory_bytes, *(each.memory_bytes for each in hosts)]),
        )


def _of(kind: str, subject: str) -> Select[Task]:
    return select(Task).where(Task.kind == kind, Task.subject == subject)


def _requested(kind: str, tenant: str) -> Select[Task]:
    join = select(Task).join(TaskRequest, TaskRequest.task_number == Task.number)
    return join.where(TaskRequest.tenant == tenant, TaskRequest.kind == kind)


def _can_start(now: datetime) -> ColumnElement[bool]:
    return (Task.state == TaskState.WAITING) & or_(Task.not_before.is_(None), Task.not_before <= now)
