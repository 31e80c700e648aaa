"""What DBOS does not know of tasks: their attempts, the memory they take, turns of tenants, and live workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import BigInteger, ForeignKey, String, false, func, select, update
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Table, UtcTime
from server.database.database import Repository, add_if_absent, lock_name, locked

HOST_LASTS = timedelta(minutes=5)  # a machine without a heartbeat for longer is ignored


class Task(Table):
    """The attempts at one task. The row exists from the first attempt until the task ends."""

    __tablename__ = "tasks"

    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    subject: Mapped[str] = mapped_column(String(64), primary_key=True)  # the id of the program or round
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # estimated peak
    attempts: Mapped[int] = mapped_column(default=0)
    unavailable_since: Mapped[datetime | None] = mapped_column(UtcTime)  # the task waits for a store or a disk
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"), index=True)  # its machine has the memory
    claim_id: Mapped[str | None] = mapped_column(String(64))  # the running attempt


class TaskTurn(Table):
    """The start tag of a tenant's next task of a kind; of the tenant `SERVED`: that of the latest task that began."""

    __tablename__ = "task_turns"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger)


SERVED = "*"  # no tenant can have this name


class WorkerProcess(Table):
    """A worker process, the memory that all tasks of its machine may take together, and its peaks, bytes."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pid: Mapped[int] = mapped_column()
    host: Mapped[str] = mapped_column(String(255), default="")
    pid_space: Mapped[str] = mapped_column(String(255), default="")  # where `pid` identifies a process
    started_at: Mapped[datetime] = mapped_column(UtcTime)
    seen_at: Mapped[datetime] = mapped_column(UtcTime)
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # An operator set the limit; otherwise a single task may take more.
    limited: Mapped[bool] = mapped_column(default=False, server_default=false())
    peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    compiler_peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)


@dataclass(frozen=True)
class Capacity:
    """Memory for tasks, bytes: free on this machine, in all on this machine, and on the largest machine.

    reserved: whether a waiting task has reserved memory of this machine.
    """

    free: float
    machine: float
    largest: float
    reserved: bool


class TaskRepository(Repository):
    """Tasks, turns and workers in one session."""

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
        """Stores that a task with this start tag began."""
        add_if_absent(self._session, TaskTurn, tenant=SERVED, kind=kind, turn=0)
        served = update(TaskTurn).where(TaskTurn.tenant == SERVED, TaskTurn.kind == kind, TaskTurn.turn < tag)
        self._session.execute(served.values(turn=tag))

    def ensure(self, kind: str, subject: str) -> Task:
        """Returns the row of a task, locked, and inserts it if it does not exist."""
        while (task := self._one(Task, Task.kind == kind, Task.subject == subject, lock=True)) is None:
            add_if_absent(self._session, Task, kind=kind, subject=subject, memory_bytes=0, attempts=0)
        return task

    def claimed(self, kind: str, subject: str, claim_id: str) -> Task | None:
        """Returns the task, locked, if this attempt still runs."""
        claimed = Task.subject == subject, Task.claim_id == claim_id
        return self._one(Task, Task.kind == kind, *claimed, lock=True)

    def lost(self, alive: Collection[str], *, lock: bool) -> Sequence[Task]:
        """Returns the tasks of workers that are not alive."""
        lost = select(Task).where(Task.worker_id.is_not(None), Task.worker_id.not_in(alive))
        lost = lost.order_by(Task.kind, Task.subject)
        return self._session.scalars(locked(lost) if lock else lost).all()

    def seen(self, since: datetime) -> Sequence[WorkerProcess]:
        """Returns the workers with a heartbeat after `since`."""
        return self._session.scalars(select(WorkerProcess).where(WorkerProcess.seen_at >= since)).all()

    def peaks(self, since: datetime) -> tuple[int, int, int]:
        """Returns the number of workers seen after `since`, and the peak memory, bytes, of one and of a compiler."""
        columns = func.count(), func.max(WorkerProcess.peak_rss_bytes), func.max(WorkerProcess.compiler_peak_rss_bytes)
        count, worker, compiler = self._session.execute(select(*columns).where(WorkerProcess.seen_at >= since)).one()
        return count, worker or 0, compiler or 0

    def capacity_locked(self, worker_id: str, task: Task, now: datetime) -> Capacity:
        """Returns the memory for a task of a worker's machine, whose workers claim tasks in turn.

        Without an operator's limit a task of any size may run alone.
        """
        own = self._session.get_one(WorkerProcess, worker_id)
        lock_name(self._session, "machine", own.host)
        others = select(Task).join(WorkerProcess, WorkerProcess.id == Task.worker_id)
        others = others.where(WorkerProcess.host == own.host)
        holding = [each for each in self._session.scalars(others) if each is not task]
        used = sum(each.memory_bytes for each in holding)
        machines = [own, *self.seen(now - HOST_LASTS)]
        unlimited = any(not machine.limited for machine in machines)
        return Capacity(
            free=float("inf") if not used and not own.limited else max(0, own.memory_bytes - used),
            machine=own.memory_bytes,
            largest=float("inf") if unlimited else max(machine.memory_bytes for machine in machines),
            reserved=any(each.claim_id is None for each in holding),
        )
