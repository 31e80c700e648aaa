"""The exposition of metrics: counters of this process, and counts from the database that are a few seconds old."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from server.database.columns import utc_now
from server.database.database import Database
from server.inference.scorer import ScorerMeters
from server.jobs.leases.endpoints import make_polls_gauge
from server.jobs.submission import make_program_counter
from server.operations.metrics.repository import LIVE, Census, CensusRepository
from server.web.middleware import Meters
from server.web.state import AppState
from shared.errors import Unavailable

FRESH_SECONDS = 5.0
COMPILE_SECONDS = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_log = structlog.get_logger()


class Exposition:
    """Collects the metrics of one server."""

    def __init__(self, meters: Meters, database: Database) -> None:
        self._meters, self._database = meters, database
        for make in (make_program_counter, make_polls_gauge, ScorerMeters):
            meters.part(make)  # so that they are exposed before their first use
        self._lock = threading.Lock()
        self._census: Census | None = None
        self._census_at = -FRESH_SECONDS

    def text(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric family."""
        yield from self._meters.registry.collect()
        yield from self._pool()
        census = self._fresh_census()
        yield _gauge("mobizo_database_up", "Whether the database answered this scrape", census is not None)
        if census is not None:
            yield from _families(census)

    def _fresh_census(self) -> Census | None:
        """Returns the counts from the database, or None if it is unavailable."""
        with self._lock:
            if time.monotonic() - self._census_at < FRESH_SECONDS:
                return self._census
            try:
                with self._database.reading() as session:
                    self._census = CensusRepository(session).take(utc_now())
            except (SQLAlchemyError, Unavailable) as error:
                _log.error("metrics-without-database", exc_info=error)
                self._census = None
            self._census_at = time.monotonic()
            return self._census

    def _pool(self) -> Iterator[Metric]:
        pool = self._database.engine.pool
        if isinstance(pool, QueuePool):
            yield _gauge("mobizo_database_connections_used", "Connections taken from the pool", pool.checkedout())
            yield _gauge("mobizo_database_connections_kept", "Connections that the pool keeps open", pool.size())


def make_exposition(state: AppState) -> Exposition:
    """Creates the exposition of a server."""
    return Exposition(state.meters, state.database)


def _gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value)


def _by(name: str, description: str, label: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, description, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def _families(census: Census) -> Iterator[Metric]:
    yield _by("mobizo_jobs", "Jobs by state", "state", census.jobs.items())
    yield _by(
        "mobizo_jobs_oldest_seconds",
        "Age of the oldest job in each waiting state; 0 without one",
        "state",
        census.oldest_seconds.items(),
    )
    yield _gauge("mobizo_tenants", "Tenants, including suspended ones", census.tenants)
    yield _gauge("mobizo_devices_enrolled", "Enrolled devices that are not revoked", census.devices)
    yield _by(
        "mobizo_devices_seen",
        "Enrolled devices with a request within the given time",
        "within",
        census.devices_seen.items(),
    )
    yield _gauge("mobizo_leases_live", "Jobs leased to devices", census.leases[LIVE])
    ended = CounterMetricFamily("mobizo_leases_ended", "Ended leases by outcome", labels=["ending"])
    for ending, count in census.leases.items():
        if ending != LIVE:
            ended.add_metric([ending], count)
    yield ended
    yield CounterMetricFamily("mobizo_leases_reassigned", "Leases of jobs that had an earlier lease", census.reassigned)
    yield _by("mobizo_programs", "Programs by state", "state", census.programs.items())
    compiles = HistogramMetricFamily(
        "mobizo_compile_seconds",
        "Duration of the latest compilation of each program, by outcome",
        labels=["outcome"],
    )
    for outcome, seconds in census.compile_seconds.items():
        counts = [(str(float(limit)), float(sum(each <= limit for each in seconds))) for limit in COMPILE_SECONDS]
        compiles.add_metric([outcome], [*counts, ("+Inf", float(len(seconds)))], sum(seconds))
    yield compiles
    workers = census.workers
    yield _gauge("mobizo_workers_alive", "Worker processes with a heartbeat within a minute", workers.alive)
    yield _by(
        "mobizo_workers_peak_rss_bytes",
        "Peak memory of these workers and of their compilers",
        "of",
        (("worker", workers.peak_rss_bytes), ("compiler", workers.compiler_peak_rss_bytes)),
    )
