"""Prometheus metrics: the meters of this process, and counts from the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

import structlog
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from sqlalchemy import Select, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from server.database.columns import utc_now
from server.database.database import Database
from server.identity.access_rules import needs
from server.identity.devices.repository import Device
from server.identity.tenants import Tenant
from server.identity.tokens import Principal
from server.inference.scorer import ScorerMeters
from server.jobs.leases.endpoints import make_polls_gauge
from server.jobs.leases.repository import Ending, LeaseRepository
from server.jobs.repository import Job
from server.jobs.submission import make_program_counter
from server.programs.service import Program, ProgramRepository, ProgramState
from server.tasks.repository import TaskRepository
from server.web.middleware import Meters
from server.web.routes import Routes
from server.web.state import State
from shared.access import Scope
from shared.errors import Unavailable
from shared.job import JobState

COMPILE_SECONDS = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
WAITING = (JobState.QUEUED, JobState.COMPILING, JobState.READY)
SEEN_WINDOWS = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
WORKER_ALIVE = timedelta(seconds=60)
_log = structlog.get_logger()
router = Routes(tags=["server"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(principal: Annotated[Principal, needs(Scope.METRICS_READ)], state: State) -> Response:
    """Returns metrics of the whole server in Prometheus's text format, without names of jobs, devices or tenants."""
    return Response(Exposition(state.meters, state.database).text(), media_type=CONTENT_TYPE_LATEST)


class Exposition:
    """Collects the metrics of one server."""

    def __init__(self, meters: Meters, database: Database) -> None:
        self._meters, self._database = meters, database
        for make in (make_program_counter, make_polls_gauge, ScorerMeters):
            meters.part(make)  # so that they are exposed before their first use

    def text(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric family."""
        yield from self._meters.registry.collect()
        pool = self._database.engine.pool
        if isinstance(pool, QueuePool):
            yield _gauge("mobizo_database_connections_used", "Connections taken from the pool", pool.checkedout())
            yield _gauge("mobizo_database_connections_kept", "Connections that the pool keeps open", pool.size())
        counts = self._of_database()
        yield _gauge("mobizo_database_up", "Whether the database answered this scrape", counts is not None)
        yield from counts or ()

    def _of_database(self) -> list[Metric] | None:
        """Returns the counts from the database, or None if it is unavailable."""
        try:
            with self._database.reading() as session:
                return list(_counts(session, utc_now()))
        except (SQLAlchemyError, Unavailable) as error:
            _log.error("metrics-without-database", exc_info=error)
            return None


def _gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value)


def _by(name: str, description: str, label: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, description, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counts(session: Session, now: datetime) -> Iterator[Metric]:
    """Yields counts over the whole server."""
    yield from _jobs(session, now)
    tenants = session.scalar(select(func.count()).select_from(Tenant)) or 0
    yield _gauge("mobizo_tenants", "Tenants, including suspended ones", tenants)
    yield _gauge("mobizo_devices_enrolled", "Enrolled devices that are not revoked", _devices(session))
    seen = {name: _devices(session, now - window) for name, window in SEEN_WINDOWS.items()}
    yield _by("mobizo_devices_seen", "Enrolled devices with a request within the given time", "within", seen)
    leases, reassigned = LeaseRepository(session).counts()
    yield _gauge("mobizo_leases_live", "Jobs leased to devices", leases[None])
    ended = CounterMetricFamily("mobizo_leases_ended", "Ended leases by outcome", labels=["ending"])
    for ending in Ending:
        ended.add_metric([ending], leases[ending])
    yield ended
    yield CounterMetricFamily("mobizo_leases_reassigned", "Leases of jobs that had an earlier lease", reassigned)
    yield _by("mobizo_programs", "Programs by state", "state", ProgramRepository(session).counts())
    yield _compilations(session)
    alive, worker, compiler = TaskRepository(session).peaks(now - WORKER_ALIVE)
    yield _gauge("mobizo_workers_alive", "Worker processes with a heartbeat within a minute", alive)
    peaks = {"worker": worker, "compiler": compiler}
    yield _by("mobizo_workers_peak_rss_bytes", "Peak memory of these workers and of their compilers", "of", peaks)


def _jobs(session: Session, now: datetime) -> Iterator[Metric]:
    counts, oldest = dict.fromkeys(JobState, 0), dict.fromkeys(WAITING, 0.0)
    # From an index alone.
    columns = Job.state, func.count(), func.min(Job.number)
    for state, count, first in session.execute(select(*columns).group_by(Job.state)).all():
        counts[state] = count
        if state in WAITING:
            # A waiting job is updated only when it enters or leaves the state.
            since = session.scalars(select(Job.updated_at).where(Job.number == first)).one()
            oldest[state] = max(0.0, (now - since).total_seconds())
    yield _by("mobizo_jobs", "Jobs by state", "state", counts)
    description = "Age of the oldest job in each waiting state; 0 without one"
    yield _by("mobizo_jobs_oldest_seconds", description, "state", oldest)


def _devices(session: Session, seen_after: datetime | None = None) -> int:
    statement = select(func.count()).select_from(Device).where(Device.revoked_at.is_(None))
    if seen_after is not None:
        statement = statement.where(Device.last_seen_at >= seen_after)
    return session.scalar(statement) or 0


def _compilations(session: Session) -> Metric:
    times: dict[str, Select[*tuple[Any, ...]]] = {
        "ready": select(Program.started_at, Program.ready_at).where(Program.state == ProgramState.READY),
        # A program's jobs fail with it, so the last of them gives the time.
        "failed": select(Program.started_at, func.max(Job.updated_at))
        .join(Job, Job.recipe_id == Program.recipe_id)
        .where(Program.state == ProgramState.FAILED, Job.state == JobState.FAILED)
        .group_by(Program.number),
    }
    description = "Duration of the latest compilation of each program, by outcome"
    family = HistogramMetricFamily("mobizo_compile_seconds", description, labels=["outcome"])
    for outcome, statement in times.items():
        # Programs compiled by an earlier release have no start time.
        seconds = [
            (end - begin).total_seconds() for begin, end in session.execute(statement) if begin and end and end >= begin
        ]
        counts = [(str(float(limit)), float(sum(each <= limit for each in seconds))) for limit in COMPILE_SECONDS]
        family.add_metric([outcome], [*counts, ("+Inf", float(len(seconds)))], sum(seconds))
    return family
