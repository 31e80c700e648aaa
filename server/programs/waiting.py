"""All SQL about which program is compiled next, and what the machines that compile have left.

Tenants take turns: the one whose last turn is longest ago has the next, so that a thousand recipes of one tenant hold
another's first up by one compile at most. It is start-time fair queueing where every compile costs the same. Among a
tenant's own programs the highest priority of the jobs that wait goes first, then the oldest job. Both look-ups follow
indexes: turns in order, and a tenant's queued jobs in order, until one is found that can be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session

from server.db.locking import locked
from server.db.upsert import add_if_absent
from server.formats.models import Conversion, ConversionState
from server.jobs.models import Job
from server.programs.models import CompileTurn, Program, ProgramState, Worker, WorkerHost
from shared.job import JobState

OPERATOR = ""  # the tenant, whom no request can name, that takes turns for programs that an operator wants anew


@dataclass(frozen=True)
class Candidate:
    """A program that may be compiled now, whose turn it takes, and since when that waits."""

    program: Program
    tenant: str
    since: datetime


class WaitingRepository:
    """Programs that wait, tenants' turns and machines in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def take_turns(self, tenant: str) -> None:
        """From now on the tenant has turns, the first of them soon."""
        add_if_absent(self._session, CompileTurn, tenant=tenant, turn=0)

    def took_turn(self, tenant: str) -> None:
        """The tenant's next turn comes after everyone else's."""
        latest = self._session.scalar(select(func.max(CompileTurn.turn))) or 0
        self._session.get_one(CompileTurn, tenant).turn = latest + 1

    def next(self, now: datetime, most_bytes: int | None = None) -> Candidate | None:
        """The program whose turn it is, of those that take at most `most_bytes`; locked until the transaction ends."""
        can = _can_start(now, most_bytes)
        queued = _queued(can).where(Job.tenant == CompileTurn.tenant).correlate(CompileTurn).exists()
        anew = select(Program.number).where(Program.anew, can).exists()
        has_some = or_(queued, (CompileTurn.tenant == OPERATOR) & anew)
        tenant = self._session.scalar(select(CompileTurn.tenant).where(has_some).order_by(CompileTurn.turn).limit(1))
        if tenant is None:
            return None
        if tenant == OPERATOR:
            statement = select(Program, Program.created_at).where(Program.anew, can).order_by(Program.number)
        else:
            statement = (
                select(Program, Job.created_at)
                .join(Job, Job.recipe_id == Program.recipe_id)
                .where(Job.tenant == tenant, Job.state == JobState.QUEUED, can)
                .order_by(Job.priority.desc(), Job.number)
            )
        row = self._session.execute(locked(statement.limit(1), of=Program, skip=True)).first()
        return None if row is None else Candidate(row[0], tenant, row[1])

    def any(self, now: datetime) -> bool:
        """Whether there is something for a worker to do: a program that may be compiled, or one to take back."""
        return self._session.scalar(select(Program.number).where(_to_claim(now)).limit(1)) is not None

    def startable(self, now: datetime, limit: int) -> Sequence[str]:
        """Recipe ids of programs that may be compiled now, or taken back from a worker that fell silent."""
        statement = select(Program.recipe_id).where(_to_claim(now)).order_by(Program.number)
        return self._session.scalars(statement.limit(limit)).all()

    def lapsed(self, now: datetime) -> Sequence[Program]:
        """Programs whose worker has not been heard from in time; locked until the transaction ends."""
        statement = select(Program).where(_lapsed(now)).order_by(Program.number)
        return self._session.scalars(locked(statement, skip=True)).all()

    def under_way(self, pid_space: str) -> Sequence[tuple[Program, Worker]]:
        """Programs that compile where process numbers mean what they do here, and their workers."""
        statement = (
            select(Program, Worker)
            .join(Worker, Worker.id == Program.worker_id)
            .where(Program.state == ProgramState.COMPILING, Worker.pid_space == pid_space)
            .order_by(Program.number)
        )
        return [(row[0], row[1]) for row in self._session.execute(statement)]

    def keep_host(self, name: str, memory_bytes: int, limited: bool, now: datetime) -> None:
        """Notes what a machine may give to its compiles, and that it was heard from."""
        add_if_absent(self._session, WorkerHost, name=name, memory_bytes=memory_bytes, limited=limited, seen_at=now)
        host = self._session.get_one(WorkerHost, name)
        host.memory_bytes, host.limited, host.seen_at = memory_bytes, limited, now

    def locked_host(self, worker_id: str) -> WorkerHost | None:
        """The worker's machine; until the transaction ends no other worker there is given anything."""
        statement = select(WorkerHost).join(Worker, Worker.host == WorkerHost.name).where(Worker.id == worker_id)
        return self._session.scalar(locked(statement, of=WorkerHost))

    def used_bytes(self, host: str) -> int:
        """What the compiles and conversions under way on a machine take together, as estimated."""
        compiles = (
            select(func.sum(Program.memory_bytes))
            .join(Worker, Worker.id == Program.worker_id)
            .where(Program.state == ProgramState.COMPILING, Worker.host == host)
        )
        conversions = (
            select(func.sum(Conversion.memory_bytes))
            .join(Worker, Worker.id == Conversion.worker_id)
            .where(Conversion.state == ConversionState.CONVERTING, Worker.host == host)
        )
        return int(self._session.scalar(compiles) or 0) + int(self._session.scalar(conversions) or 0)

    def hosts(self, since: datetime) -> Sequence[WorkerHost]:
        """Machines heard from after `since`."""
        return self._session.scalars(select(WorkerHost).where(WorkerHost.seen_at >= since)).all()


def _can_start(now: datetime, most_bytes: int | None) -> ColumnElement[bool]:
    due = or_(Program.next_attempt_at.is_(None), Program.next_attempt_at <= now)
    can = (Program.state == ProgramState.PENDING) & due
    return can if most_bytes is None else can & (Program.memory_bytes <= most_bytes)


def _to_claim(now: datetime) -> ColumnElement[bool]:
    wanted = or_(Program.anew, select(Job.number).where(*_waits()).correlate(Program).exists())
    return or_(_can_start(now, None) & wanted, _lapsed(now))


def _lapsed(now: datetime) -> ColumnElement[bool]:
    return (Program.state == ProgramState.COMPILING) & (Program.lease_expires_at < now)


def _waits() -> tuple[ColumnElement[bool], ...]:
    return Job.recipe_id == Program.recipe_id, Job.state == JobState.QUEUED


def _queued(can: ColumnElement[bool]) -> Select[int]:
    return select(Job.number).join(Program, Program.recipe_id == Job.recipe_id).where(Job.state == JobState.QUEUED, can)
