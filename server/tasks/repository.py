"""The tables and all SQL of the task queue: tasks, requests for them, turns of tenants, workers and their machines.

`TaskService` is how features request a task, in the transaction that needs its work.

Tenants take turns, separately for each kind of task: the tenant and kind whose latest turn is longest ago come next.
So a thousand recipes of one tenant delay another tenant's first recipe by one compile at most, and compiles do not
delay conversions. This is start-time fair queueing in which every task costs the same. Among a tenant's tasks of a kind
the highest priority of their requests goes first, then the oldest request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
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
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, utc_now, word
from server.database.database import add_if_absent, locked
from shared.job import JobError

_SCHEDULED = "mobizo-scheduled"  # the key in `Session.info`


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


@dataclass(frozen=True)
class Candidate:
    """A task that may be claimed now, the tenant whose turn it is, and the time of the request."""

    task: Task
    tenant: str
    since: datetime


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
        waiting = TaskState.WAITING
        add_if_absent(
            self._session, Task, kind=kind, subject=subject, state=waiting, memory_bytes=memory_bytes, attempts=0
        )
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

    def add_request(self, task: Task, requester: str, tenant: str, priority: int, now: datetime) -> None:
        """Adds a request for a task, and a row for the turns of its tenant."""
        add_if_absent(
            self._session,
            TaskRequest,
            task_number=task.number,
            requester=requester,
            kind=task.kind,
            tenant=tenant,
            priority=priority,
            created_at=now,
        )
        add_if_absent(self._session, TaskTurn, tenant=tenant, kind=task.kind, turn=0)

    def remove_request(self, requester: str) -> None:
        """Removes a request if it exists."""
        self._session.execute(delete(TaskRequest).where(TaskRequest.requester == requester))

    def remove_requests(self, task: Task) -> None:
        """Removes all requests of a task."""
        self._session.execute(delete(TaskRequest).where(TaskRequest.task_number == task.number))

    def is_requested(self, task: Task) -> bool:
        """Returns whether a task has requests."""
        request = select(TaskRequest.number).where(TaskRequest.task_number == task.number).limit(1)
        return self._session.scalar(request) is not None

    def took_turn(self, tenant: str, kind: str) -> None:
        """Moves the tenant's next turn for this kind behind all others."""
        latest = self._session.scalar(select(func.max(TaskTurn.turn))) or 0
        self._session.get_one(TaskTurn, (tenant, kind)).turn = latest + 1

    def next(self, kinds: Collection[str], now: datetime, most_bytes: int | None = None) -> Candidate | None:
        """Returns the next task of these kinds, of those that need at most `most_bytes`, without locking it."""
        can = _can_start(now) & Task.kind.in_(kinds)
        if most_bytes is not None:
            can &= Task.memory_bytes <= most_bytes
        request = select(TaskRequest.number).join(Task, Task.number == TaskRequest.task_number)
        turn_requests = request.where(TaskRequest.tenant == TaskTurn.tenant, TaskRequest.kind == TaskTurn.kind, can)
        turn = (
            select(TaskTurn.tenant, TaskTurn.kind)
            .where(turn_requests.correlate(TaskTurn).exists())
            .order_by(TaskTurn.turn)
        )
        first = self._session.execute(turn.limit(1)).first()
        if first is None:
            return None
        statement = (
            select(Task, TaskRequest.created_at)
            .join(TaskRequest, TaskRequest.task_number == Task.number)
            .where(TaskRequest.tenant == first.tenant, TaskRequest.kind == first.kind, can)
            .order_by(TaskRequest.priority.desc(), TaskRequest.number)
            .limit(1)
        )
        row = self._session.execute(statement).first()
        return None if row is None else Candidate(row[0], first.tenant, row[1])

    def startable_locked(self, task: Task, now: datetime) -> bool:
        """Locks a task and returns whether it may still be claimed."""
        statement = locked(select(Task).where(Task.number == task.number, _can_start(now)))
        return self._session.scalar(statement) is not None

    def claimed_locked(self, kind: str, subject: str, worker_id: str) -> Task | None:
        """Returns the task, locked, if that worker still holds it."""
        statement = _of(kind, subject).where(Task.worker_id == worker_id, Task.state == TaskState.RUNNING)
        return self._session.scalar(locked(statement))

    def lapsed(self, kinds: Collection[str], now: datetime) -> Sequence[Task]:
        """Returns the tasks of these kinds whose worker has not sent a heartbeat in time."""
        statement = select(Task).where(_lapsed(now), Task.kind.in_(kinds)).order_by(Task.number)
        return self._session.scalars(statement).all()

    def lapsed_locked(self, task: Task, now: datetime) -> bool:
        """Locks a task and returns whether its worker is still overdue."""
        return self._session.scalar(locked(select(Task).where(Task.number == task.number, _lapsed(now)))) is not None

    def any(self, now: datetime) -> bool:
        """Returns whether there is a task to claim or to take back."""
        return self._session.scalar(select(Task.number).where(_to_claim(now)).limit(1)) is not None

    def claimable(self, now: datetime, limit: int) -> Sequence[Task]:
        """Returns tasks that may be claimed now, or taken back from a worker without heartbeats."""
        return self._session.scalars(select(Task).where(_to_claim(now)).order_by(Task.number).limit(limit)).all()

    def running(self, pid_space: str) -> Sequence[tuple[Task, WorkerProcess]]:
        """Returns running tasks, with their workers, whose process ids are comparable with this process."""
        statement = (
            select(Task, WorkerProcess)
            .join(WorkerProcess, WorkerProcess.id == Task.worker_id)
            .where(Task.state == TaskState.RUNNING, WorkerProcess.pid_space == pid_space)
            .order_by(Task.number)
        )
        return [(row[0], row[1]) for row in self._session.execute(statement)]

    def holders(self, now: datetime) -> set[str]:
        """Returns the ids of the workers that hold a task now."""
        statement = select(Task.worker_id).where(Task.state == TaskState.RUNNING, Task.lease_expires_at >= now)
        return {worker_id for worker_id in self._session.scalars(statement) if worker_id is not None}


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

    def peaks(self, since: datetime) -> tuple[int, int]:
        """Returns the peak memory, bytes, of workers and of their child processes, for workers seen after `since`."""
        statement = select(func.max(WorkerProcess.peak_rss_bytes), func.max(WorkerProcess.compiler_peak_rss_bytes))
        worker, compiler = self._session.execute(statement.where(WorkerProcess.seen_at >= since)).one()
        return worker or 0, compiler or 0

    def keep_host(self, name: str, memory_bytes: int, limited: bool, now: datetime) -> None:
        """Stores the memory of a machine for tasks, and the time of this heartbeat."""
        add_if_absent(self._session, WorkerHost, name=name, memory_bytes=memory_bytes, limited=limited, seen_at=now)
        host = self._session.get_one(WorkerHost, name)
        host.memory_bytes, host.limited, host.seen_at = memory_bytes, limited, now

    def locked_host(self, worker_id: str) -> WorkerHost | None:
        """Returns the worker's machine, locked: no other worker there claims a task until the transaction ends."""
        host = select(WorkerHost).join(WorkerProcess, WorkerProcess.host == WorkerHost.name)
        return self._session.scalar(locked(host.where(WorkerProcess.id == worker_id), of=WorkerHost))

    def hosts(self, since: datetime) -> Sequence[WorkerHost]:
        """Returns the machines seen after `since`."""
        return self._session.scalars(select(WorkerHost).where(WorkerHost.seen_at >= since)).all()

    def used_bytes(self, host: str) -> int:
        """Returns the estimated memory of all running tasks of a machine, bytes."""
        statement = (
            select(func.sum(Task.memory_bytes))
            .join(WorkerProcess, WorkerProcess.id == Task.worker_id)
            .where(Task.state == TaskState.RUNNING, WorkerProcess.host == host)
        )
        return int(self._session.scalar(statement) or 0)


def _of(kind: str, subject: str) -> Select[Task]:
    return select(Task).where(Task.kind == kind, Task.subject == subject)


def _can_start(now: datetime) -> ColumnElement[bool]:
    return (Task.state == TaskState.WAITING) & or_(Task.not_before.is_(None), Task.not_before <= now)


def _lapsed(now: datetime) -> ColumnElement[bool]:
    return (Task.state == TaskState.RUNNING) & (Task.lease_expires_at < now)


def _to_claim(now: datetime) -> ColumnElement[bool]:
    # A scalar subquery instead of EXISTS: PostgreSQL turns EXISTS into a join that reads both tables completely.
    request = select(TaskRequest.number).where(TaskRequest.task_number == Task.number).limit(1)
    return or_(_can_start(now) & request.scalar_subquery().is_not(None), _lapsed(now))


def note_scheduled(session: Session, task: str) -> None:
    """Records the name of a task that waits for a worker, so that the engine announces it to workers."""
    session.info.setdefault(_SCHEDULED, set()).add(task)


def noted_scheduled(session: Session) -> list[str]:
    """Returns the names recorded in this transaction, sorted, and clears the record."""
    names: set[str] = session.info.pop(_SCHEDULED, set())
    return sorted(names)


UNFINISHED = (TaskState.WAITING, TaskState.RUNNING)


class TaskService:
    """Tasks and their requests in one transaction. Lock a task's subject before calling `schedule` or `cancel`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tasks = TaskRepository(session)

    def schedule(self, kind: str, subject: str, memory_bytes: int = 0) -> Task:
        """Schedules the task of a subject and returns it. A task that has ended starts over.

        memory_bytes: the estimated peak memory. The task runs only while a request for it exists.
        """
        task = self._tasks.ensure(kind, subject, memory_bytes)
        if task.state not in UNFINISHED:
            task.state, task.memory_bytes, task.attempts = TaskState.WAITING, memory_bytes, 0
            task.not_before = task.error = None
        note_scheduled(self._session, task.name)
        return task

    def request(self, kind: str, subject: str, requester: str, tenant: str, priority: int = 0) -> None:
        """Adds a tenant's request for a scheduled task. Tenants take turns; higher priorities go first."""
        task = self._tasks.get(kind, subject)
        if task is not None:
            self._tasks.add_request(task, requester, tenant, priority, utc_now())

    def withdraw(self, requester: str) -> None:
        """Removes a request. A running task without requests is stopped at its next heartbeat."""
        self._tasks.remove_request(requester)

    def cancel(self, kind: str, subject: str) -> None:
        """Cancels a task that has not ended; its worker stops at its next heartbeat."""
        task = self._tasks.get_locked(kind, subject)
        if task is not None and task.state in UNFINISHED:
            end(self._tasks, task, TaskState.CANCELLED)


def end(tasks: TaskRepository, task: Task, state: TaskState) -> None:
    """Ends a locked task and removes all its requests."""
    task.state = state
    task.worker_id = task.lease_expires_at = task.not_before = None
    tasks.remove_requests(task)
