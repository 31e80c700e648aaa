"""A scrape: what this process counted, and what the database holds, a few seconds old at most. Knows no HTTP."""

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

from server.clock import utc_now
from server.db.database import Database
from server.metrics.meters import Meters
from server.metrics.repository import LIVE, Census, CensusRepository
from shared.errors import Unavailable

FRESH_SECONDS = 5.0
COMPILE_SECONDS = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_log = structlog.get_logger()


class Exposition:
    """What one server tells; its parts may change hands between scrapes, as in tests."""

    def __init__(self, meters: Meters, database: Database) -> None:
        self._meters, self._database = meters, database
        self._lock = threading.Lock()
        self._census: Census | None = None
        self._taken = -FRESH_SECONDS

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield from self._meters.registry.collect()
        yield from self._pool()
        census = self._counted()
        yield _gauge("mobizo_database_up", "Whether the database answered this scrape", census is not None)
        if census is not None:
            yield from _families(census)

    def _counted(self) -> Census | None:
        """None if the database is away: what the process itself counted is told all the same."""
        with self._lock:
            if time.monotonic() - self._taken < FRESH_SECONDS:
                return self._census
            try:
                with self._database.reading() as session:
                    self._census = CensusRepository(session).take(utc_now())
            except (SQLAlchemyError, Unavailable) as error:
                _log.error("metrics-without-database", exc_info=error)
                self._census = None
            self._taken = time.monotonic()
            return self._census

    def _pool(self) -> Iterator[Metric]:
        pool = self._database.engine.pool
        if isinstance(pool, QueuePool):
            yield _gauge("mobizo_database_connections_used", "Connections taken from the pool", pool.checkedout())
            yield _gauge("mobizo_database_connections_kept", "Connections that the pool keeps open", pool.size())


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value)


def _by(name: str, told: str, label: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, told, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def _families(census: Census) -> Iterator[Metric]:
    yield _by("mobizo_jobs", "Jobs by state", "state", census.jobs.items())
    yield _by(
        "mobizo_jobs_oldest_seconds",
        "How long the oldest job of a waiting state has been in it; 0 without one",
        "state",
        census.oldest_seconds.items(),
    )
    yield _gauge("mobizo_tenants", "Tenants, suspended ones too", census.tenants)
    yield _gauge("mobizo_devices_enrolled", "Devices that enrolled and were not revoked", census.devices)
    yield _by("mobizo_devices_seen", "Of these, heard from within", "within", census.devices_seen.items())
    yield _gauge("mobizo_leases_live", "Jobs in a device's hands", census.leases[LIVE])
    ended = CounterMetricFamily("mobizo_leases_ended", "Leases by how they ended", labels=["ending"])
    for ending, count in census.leases.items():
        if ending != LIVE:
            ended.add_metric([ending], count)
    yield ended
    yield CounterMetricFamily("mobizo_leases_reassigned", "Leases on jobs that had one before", census.reassigned)
    yield _by("mobizo_programs", "Programs by state", "state", census.programs.items())
    compiles = HistogramMetricFamily(
        "mobizo_compile_seconds",
        "How long the latest compile of each program took, by outcome",
        labels=["outcome"],
    )
    for outcome, seconds in census.compile_seconds.items():
        counts = [(str(float(limit)), float(sum(each <= limit for each in seconds))) for limit in COMPILE_SECONDS]
        compiles.add_metric([outcome], [*counts, ("+Inf", float(len(seconds)))], sum(seconds))
    yield compiles
    workers = census.workers
    yield _gauge("mobizo_workers_alive", "Worker processes heard from within a minute", workers.alive)
    yield _by(
        "mobizo_workers_peak_rss_bytes",
        "Most memory that one of these workers, and one of their compilers, took",
        "of",
        (("worker", workers.peak_rss_bytes), ("compiler", workers.compiler_peak_rss_bytes)),
    )
