"""All SQL queries for metrics: counts over the whole server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from server.identity.devices.repository import Device
from server.identity.tenants import Tenant
from server.jobs.leases.repository import Ending, LeaseRepository
from server.jobs.repository import Job
from server.programs.service import Program, ProgramRepository, ProgramState
from server.tasks.repository import TaskRepository
from shared.job import JobState

WAITING = (JobState.QUEUED, JobState.COMPILING, JobState.READY)
SEEN_WINDOWS = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
WORKER_ALIVE = timedelta(seconds=60)
LIVE = "live"


@dataclass(frozen=True)
class WorkerCensus:
    """The number of live workers, and the peak memory of a worker and of a compiler, bytes."""

    alive: int
    peak_rss_bytes: int
    compiler_peak_rss_bytes: int


@dataclass(frozen=True)
class Census:
    """Counts from the database at one time."""

    jobs: dict[JobState, int]
    oldest_seconds: dict[JobState, float]  # age of the oldest job in each state
    tenants: int
    devices: int
    devices_seen: dict[str, int]
    leases: dict[str, int]  # by ending, or "live"
    reassigned: int
    programs: dict[ProgramState, int]
    compile_seconds: dict[str, list[float]]  # duration of each program's latest compilation, by outcome
    workers: WorkerCensus


def _seconds(times: Sequence[Row[datetime | None, datetime | None]]) -> list[float]:
    # Programs compiled by an earlier release have no start time.
    return [(end - begin).total_seconds() for begin, end in times if begin and end and end >= begin]


class CensusRepository:
    """Queries the counts in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def take(self, now: datetime) -> Census:
        """Returns all counts."""
        jobs, oldest = self._jobs()
        leases, reassigned = LeaseRepository(self._session).counts()
        return Census(
            jobs=jobs,
            oldest_seconds={state: self._waiting(oldest.get(state), now) for state in WAITING},
            tenants=self._session.scalar(select(func.count()).select_from(Tenant)) or 0,
            devices=self._devices(),
            devices_seen={name: self._devices(now - window) for name, window in SEEN_WINDOWS.items()},
            leases={LIVE: leases[None]} | {ending: leases[ending] for ending in Ending},
            reassigned=reassigned,
            programs=ProgramRepository(self._session).counts(),
            compile_seconds={"ready": self._compiled(), "failed": self._not_compiled()},
            workers=WorkerCensus(*TaskRepository(self._session).peaks(now - WORKER_ALIVE)),
        )

    def _jobs(self) -> tuple[dict[JobState, int], dict[JobState, int]]:
        """Returns the count and the oldest job number by state, from an index alone."""
        counts, oldest = dict.fromkeys(JobState, 0), {}
        columns = Job.state, func.count(), func.min(Job.number)
        for state, count, first in self._session.execute(select(*columns).group_by(Job.state)):
            counts[state], oldest[state] = count, first
        return counts, oldest

    def _waiting(self, number: int | None, now: datetime) -> float:
        # A waiting job is updated only when it enters or leaves the state.
        since = self._session.scalar(select(Job.updated_at).where(Job.number == number))
        return 0.0 if since is None else max(0.0, (now - since).total_seconds())

    def _devices(self, seen_after: datetime | None = None) -> int:
        statement = select(func.count()).select_from(Device).where(Device.revoked_at.is_(None))
        if seen_after is not None:
            statement = statement.where(Device.last_seen_at >= seen_after)
        return self._session.scalar(statement) or 0

    def _compiled(self) -> list[float]:
        times = select(Program.started_at, Program.ready_at).where(Program.state == ProgramState.READY)
        return _seconds(self._session.execute(times).all())

    def _not_compiled(self) -> list[float]:
        # A program's jobs fail with it, so the last of them gives the time.
        times = (
            select(Program.started_at, func.max(Job.updated_at))
            .join(Job, Job.recipe_id == Program.recipe_id)
            .where(Program.state == ProgramState.FAILED, Job.state == JobState.FAILED)
            .group_by(Program.number)
        )
        return _seconds(self._session.execute(times).all())
